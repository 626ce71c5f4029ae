"""Fields that have no effect in a recipe, because another field switches them off or the device ignores them.

The plan lists them. They are no error: a recipe often extends one that uses them. Defaults are never listed.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

from reconv.recipe.parts.data import why_not_native
from reconv.recipe.parts.engine import EngineConfig
from reconv.recipe.parts.schedule import SCHEDULES
from reconv.recipe.schema import Recipe, flatten


def unused_options(recipe: Recipe, device: str = "") -> Iterator[tuple[str, str]]:
    """Yield each field that has no effect, and why; an empty `device` is unknown and excludes nothing."""
    values, defaults = flatten(recipe), _defaults()
    seen: set[str] = set()
    for is_on, why, fields in (*_needs(recipe), *_needs_of_device(recipe.engine, device)):
        for field in () if is_on else fields:
            if field not in seen and values[field] != defaults[field]:
                seen.add(field)
                yield field, why


@cache
def _defaults() -> dict[str, Any]:
    return dict(flatten(Recipe()))


def _needs(recipe: Recipe) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Yield whether fields are used, why not, and the fields."""
    yield from _needs_of_images(recipe)
    schedule, distill, checkpoint_average = recipe.schedule, recipe.distill, recipe.checkpoint_average
    smoothed = recipe.loss.label_smoothing > 0
    yield smoothed, "loss.label_smoothing is 0", ("loss.smooth_over",)
    yield distill.teacher is not None, "distill.teacher is null", ("distill.alpha", "distill.temperature")
    yield recipe.ema.decay > 0, "ema.decay is 0", ("ema.warmup",)
    yield (
        checkpoint_average.last != "off",
        "checkpoint_average.last is off",
        ("checkpoint_average.mode", "checkpoint_average.decay"),
    )
    yield checkpoint_average.mode == "exponential", "checkpoint_average.mode is mean", ("checkpoint_average.decay",)
    warms = schedule.warmup.value > 0
    yield warms, "schedule.warmup is 0", ("schedule.warmup_from", "schedule.warmup_shape", "schedule.warmup_mode")
    yield warms or schedule.name != "constant", "schedule.name is constant, without warm-up", ("schedule.interval",)
    from_0 = SCHEDULES[schedule.name].counts_from_start and schedule.warmup_mode == "replace"
    yield not from_0, f"schedule.name {schedule.name} always counts from step 0", ("schedule.warmup_mode",)
    optimizer = recipe.optimizer.name
    yield optimizer not in ("adamw", "lamb"), f"optimizer.name is {optimizer}", ("optimizer.momentum",)
    yield recipe.optimizer.clip_grad != "off", "optimizer.clip_grad is off", ("optimizer.clip_mode",)
    rates = ("optimizer.layer_decay", "optimizer.backbone_lr_scale")
    yield not recipe.model.freeze_backbone, "model.freeze_backbone is true", rates
    fast = recipe.parallel.reduce == "fast"
    yield fast, "parallel.reduce is ordered", ("parallel.bucket_cap_mb", "parallel.gradient_compression")
    is_pipeline = recipe.parallel.pipeline_stages > 1
    yield is_pipeline, "parallel.pipeline_stages is 1", ("parallel.pipeline_schedule",)
    yield not is_pipeline, "parallel.pipeline_stages is above 1", ("parallel.bucket_cap_mb",)
    tries = recipe.engine.cudnn_benchmark != "off" and not recipe.engine.deterministic
    yield tries, "engine.cudnn_benchmark is off", ("engine.cudnn_benchmark_limit",)
    skips = recipe.engine.non_finite.policy == "skip"
    yield skips, "engine.non_finite.policy is stop", ("engine.non_finite.max_skipped",)
    yield recipe.evaluate.every != "off", "evaluate.every is off", ("evaluate.offset", "evaluate.num_samples")
    yield recipe.save.every != "off", "save.every is off", ("save.keep_last", "save.keep_best", "save.background")


def _needs_of_device(engine: EngineConfig, device: str) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    """Only what is switched on has no effect: a device without a feature complies with `off`."""
    lacks_cuda = device not in ("", "cuda")
    none = f"{device} does not use cuDNN"
    yield not (lacks_cuda and engine.cudnn_benchmark == "on"), none, ("engine.cudnn_benchmark",)
    yield not lacks_cuda, none, ("engine.cudnn_benchmark_limit",)
    yield (
        not (lacks_cuda and engine.cuda_graphs == "on"),
        f"{device} has no CUDA graphs",
        ("engine.cuda_graphs",),
    )


def _needs_of_images(recipe: Recipe) -> Iterator[tuple[bool, str, tuple[str, ...]]]:
    augment, cutmix = recipe.augment, recipe.augment.cutmix
    spec, as_is = recipe.data.preprocess, "augment.train_like_eval is true"
    crops = ("padding", "padding_mode", "scale", "ratio", "attempts", "fallback", "antialias")
    yield not augment.train_like_eval, as_is, _field_names("augment", "crop", "hflip", "hflip_mode", *crops)
    by_image = "data.preprocess.per_image_standardization is true"
    # Grayscale images cannot have the default means, which are for three channels.
    yield (
        not spec.per_image_standardization or spec.channels == 1,
        by_image,
        _field_names("data.preprocess", "mean", "std"),
    )
    yield not spec.per_image_standardization, by_image, ("data.preprocess.divide_by",)
    crop = f"augment.crop is {augment.crop}"
    yield augment.crop == "random", crop, _field_names("augment", "padding", "padding_mode")
    yield (
        augment.crop == "random_resized",
        crop,
        _field_names("augment", "scale", "ratio", "attempts", "fallback", "antialias"),
    )
    interpolation = augment.interpolation or spec.interpolation
    yield interpolation != "nearest", "training images are resized by nearest", ("augment.antialias",)
    reason = why_not_native(augment, spec)
    yield reason is None, reason or "", ("augment.decoder",)
    box_crop = ("no_crop_probability", "min_ious", "iou_with", "scale", "max_aspect_ratio", "trials")
    yield augment.crop == "ssd", crop, _field_names("augment.ssd_crop", *box_crop)
    yield augment.zoom_out.probability > 0, "augment.zoom_out.probability is 0", ("augment.zoom_out.max_scale",)
    yield augment.color_jitter.enabled, "augment.color_jitter is off", ("augment.color_jitter.implementation",)
    boxes = _field_names("data", "bad_boxes", "empty_images", "difficult_boxes")
    boxes += tuple(name for name in _defaults() if name.startswith("detection."))
    yield recipe.task == "detection", f"task is {recipe.task}", boxes
    yield augment.hflip > 0, "augment.hflip is 0", ("augment.hflip_mode",)
    policy = f"augment.auto_augment is {augment.auto_augment}"
    rand = ("num_ops", "magnitude", "magnitude_std", "implementation")
    yield augment.auto_augment == "randaugment", policy, _field_names("augment.randaugment", *rand)
    yield augment.auto_augment not in ("none", "3-augment"), policy, ("augment.fill",)
    yield (
        augment.random_erasing.probability > 0,
        "augment.random_erasing.probability is 0",
        _field_names("augment.random_erasing", "scale", "ratio"),
    )
    yield (
        augment.mixup.enabled,
        "augment.mixup.alpha is 0",
        _field_names("augment.mixup", "mode", "partner", "lam_at_least_half"),
    )
    off = "alpha is 0" if cutmix.mode == "beta" else "lam is 1"
    yield cutmix.enabled, f"augment.cutmix.{off}", _field_names("augment.cutmix", "mode", "roll")


def _field_names(section: str, *names: str) -> tuple[str, ...]:
    return tuple(f"{section}.{name}" for name in names)
