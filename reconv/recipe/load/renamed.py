"""Recipe fields and values that were renamed, with the new names for the error of a recipe that has an old one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

RENAMED_FIELDS: Mapping[str, str] = {
    "average": "checkpoint_average",
    "stop": "early_stopping",
    "records": "loggers",
    "augment.progressive": "augment.progressive_resizing",
    "augment.pad": "augment.padding",
    "augment.pad_form": "augment.padding_mode",
    "augment.area": "augment.scale",
    "augment.box_crop": "augment.ssd_crop",
    "augment.flip": "augment.hflip",
    "augment.flip_form": "augment.hflip_mode",
    "augment.jitter": "augment.color_jitter",
    "augment.policy": "augment.auto_augment",
    "augment.erase": "augment.random_erasing",
    "augment.mixup.per": "augment.mixup.mode",
    "augment.mixup.fold": "augment.mixup.lam_at_least_half",
    "augment.cutmix.kind": "augment.cutmix.mode",
    "augment.cutmix.keep": "augment.cutmix.lam",
    "augment.erase.area": "augment.random_erasing.scale",
    "augment.jitter.form": "augment.color_jitter.implementation",
    "augment.randaugment.n": "augment.randaugment.num_ops",
    "augment.box_crop.whole": "augment.ssd_crop.no_crop_probability",
    "augment.box_crop.overlaps": "augment.ssd_crop.min_ious",
    "augment.box_crop.overlap_with": "augment.ssd_crop.iou_with",
    "augment.box_crop.side": "augment.ssd_crop.scale",
    "augment.box_crop.ratio": "augment.ssd_crop.max_aspect_ratio",
    "augment.box_crop.candidates": "augment.ssd_crop.trials",
    "augment.zoom_out.most": "augment.zoom_out.max_scale",
    "average.kind": "checkpoint_average.mode",
    "data.tail": "data.drop_last",
    "data.percent": "data.subset_percent",
    "data.workers": "data.num_workers",
    "data.transfer": "data.transfer_dtype",
    "data.resident": "data.preload",
    "data.background": "data.background_class",
    "data.preprocess.scale": "data.preprocess.divide_by",
    "data.preprocess.standardise": "data.preprocess.per_image_standardization",
    "detection.boxes": "detection.anchors",
    "detection.max_boxes": "detection.max_gt_boxes",
    "detection.match": "detection.match_iou",
    "detection.negatives": "detection.negative_ratio",
    "detection.score": "detection.score_threshold",
    "detection.suppress": "detection.nms_iou",
    "detection.max_per_class": "detection.topk_candidates",
    "detection.max_per_image": "detection.detections_per_image",
    "detection.boxes.ratios": "detection.anchors.aspect_ratios",
    "distill.recipe": "distill.teacher_recipe",
    "ema.ramp": "ema.warmup",
    "engine.non_finite.budget": "engine.non_finite.max_skipped",
    "engine.kernels": "engine.fused_kernels",
    "engine.graph": "engine.cuda_graphs",
    "engine.autotune": "engine.cudnn_benchmark",
    "engine.autotune_limit": "engine.cudnn_benchmark_limit",
    "engine.threads": "engine.num_threads",
    "engine.cpus": "engine.cpu_affinity",
    "evaluate.batch": "evaluate.batch_size",
    "evaluate.samples": "evaluate.num_samples",
    "loss.smoothing_form": "loss.smooth_over",
    "memory.recompute": "memory.activation_checkpointing",
    "model.freeze": "model.freeze_backbone",
    "model.train": "model.trainable",
    "optimizer.kind": "optimizer.name",
    "optimizer.decay": "optimizer.weight_decay_exclude",
    "optimizer.epsilon": "optimizer.eps",
    "optimizer.trust": "optimizer.trust_coefficient",
    "optimizer.skip": "optimizer.lars_exclude",
    "optimizer.path": "optimizer.implementation",
    "optimizer.norm_bias_lr": "optimizer.norm_bias_lr_scale",
    "parallel.bucket_mb": "parallel.bucket_cap_mb",
    "parallel.compress": "parallel.gradient_compression",
    "parallel.pipeline": "parallel.pipeline_stages",
    "parallel.splits": "parallel.pipeline_splits",
    "parallel.schedule": "parallel.pipeline_schedule",
    "parallel.lost_after_s": "parallel.heartbeat_timeout_s",
    "precision.ops.lower": "precision.ops.low_precision",
    "precision.partials": "precision.reduced_precision_reduction",
    "save.pin": "save.keep_at",
    "schedule.kind": "schedule.name",
    "schedule.per": "schedule.base_batch_size",
    "schedule.update": "schedule.interval",
    "schedule.origin": "schedule.warmup_mode",
    "schedule.end_ratio": "schedule.end_lr_ratio",
    "schedule.horizon": "schedule.decay_until",
    "schedule.drops": "schedule.num_periods",
    "schedule.after": "schedule.milestone_when",
    "schedule.values": "schedule.milestone_lrs",
    "schedule.factor": "schedule.gamma",
    "schedule.start_ratio": "schedule.start_lr_ratio",
    "schedule.anneal": "schedule.anneal_strategy",
}
# Old field -> old value -> new value of the field's successor.
RENAMED_VALUES: Mapping[str, Mapping[str, str]] = {
    "augment.crop": {"resized": "random_resized", "pad": "random"},
    "augment.decoder": {"plain": "pillow"},
    "augment.fallback": {"centre": "center"},
    "augment.pad_form": {"black": "constant"},
    "data.resident": {"host": "off"},
    "data.tail": {"drop": "true", "wrap": "false"},
    "loss.smoothing_form": {"uniform": "all-classes", "others": "other-classes"},
    "optimizer.decay": {"all": "none", "not-norm-bias": "norm-bias", "not-norm": "norm"},
    "parallel.schedule": {"grouped": "gpipe", "interleaved": "1f1b"},
    "precision.partials": {"full": "off", "half": "on"},
    "schedule.kind": {"milestones": "multistep", "table": "piecewise"},
    "schedule.origin": {"warmup": "prefix", "start": "replace", "scaled": "multiply"},
}
_NOTES = {"parallel.splits": " (on one device: memory.checkpoint_segments)"}


def renamed_field(name: str, value: Any) -> str | None:
    """Present name of an unknown field, with its section's fields if it is a section; None: it never existed."""
    if name not in RENAMED_FIELDS:
        return None
    text = f"renamed to {RENAMED_FIELDS[name]}{_NOTES.get(name, '')}"
    if isinstance(value, Mapping):
        inner = [f"{name}.{key}" for key in value if f"{name}.{key}" in RENAMED_FIELDS]
        return "; ".join([text, *(f"{field} to {RENAMED_FIELDS[field]}" for field in inner)])
    new = RENAMED_VALUES.get(name, {}).get(str(value))
    return text if new is None else f"{text}: for {value} write {new}"


def renamed_value(name: str, value: Any) -> str | None:
    """Present name of a value of a field that kept its name; None: it is no former value."""
    for old, values in RENAMED_VALUES.items():
        if RENAMED_FIELDS.get(old, old) == name and isinstance(value, str) and value in values:
            return values[value]
    return None
