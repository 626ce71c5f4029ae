"""Rules between the sections of a recipe, as far as they show without the data.

All contradictions of a recipe are reported at once, each with the fields it is about. Rules within a section stand
beside it, in `parts`.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.parts.code import names_code
from reconv.recipe.parts.contradiction import Contradiction, join_words
from reconv.recipe.parts.data import augment_rules, color_jitter_rules, data_rules
from reconv.recipe.parts.metrics import METRIC_NAMES
from reconv.recipe.parts.optimizer import optimizer_rules
from reconv.recipe.parts.schedule import schedule_rules
from reconv.recipe.units import Duration

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

BOX_SOURCES = ("auto", "coco", "voc", "yolo", "tfrecord", "scattered-digits", "synthetic", "synthetic-device")
MULTILABEL_SOURCES = ("auto", "csv", "synthetic", "synthetic-device")
_BOXES_ONLY = ("coco", "voc", "yolo", "scattered-digits")


def contradictions(recipe: Recipe) -> list[Contradiction]:
    """Every contradiction between the fields of a recipe."""
    rules = (
        *(durations_rules, model_rules, data_rules, augment_rules, color_jitter_rules, task_rules, anchors_rules),
        *(batch_rules, schedule_rules, optimizer_rules, end_of_run_rules, engine_rules, precision_rules),
        *(results_rules, memory_rules, pipeline_rules),
    )
    return [contradiction for rule in rules for contradiction in rule(recipe)]


def durations_rules(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.length.unit not in ("ep", "step"):
        yield Contradiction(("length",), f"must be in epochs or steps, as in 90ep or 5000step, not {recipe.length}")
    positive = {
        "length": recipe.length,
        "model.freeze_until": recipe.model.freeze_until,
        "schedule.period": recipe.schedule.period,
        "schedule.decay_until": recipe.schedule.decay_until,
        "evaluate.every": recipe.evaluate.every,
        "save.every": recipe.save.every,
        "log.every": recipe.log.every,
    }
    for field, duration in positive.items():
        if isinstance(duration, Duration) and duration.value == 0:
            hint = (
                "; write off to switch it off"
                if field in ("model.freeze_until", "evaluate.every", "save.every")
                else ""
            )
            yield Contradiction((field,), f"must be longer than {duration}{hint}")
    without_minutes: list[tuple[str, Duration | str | None]] = [
        ("model.freeze_until", recipe.model.freeze_until),
        ("schedule.warmup", recipe.schedule.warmup),
        ("schedule.period", recipe.schedule.period),
        ("schedule.decay_until", recipe.schedule.decay_until),
        ("evaluate.every", recipe.evaluate.every),
        ("evaluate.offset", recipe.evaluate.offset),
        ("log.every", recipe.log.every),
        *(("schedule.milestones", milestone) for milestone in recipe.schedule.milestones),
        *(("save.keep_at", point) for point in recipe.save.keep_at),
        *(("augment.progressive_resizing", start) for start, _ in recipe.augment.progressive_resizing),
    ]
    for field, point in without_minutes:
        if isinstance(point, Duration) and point.unit == "min":
            yield Contradiction((field,), f"cannot be in minutes ({point}): results must not depend on the clock")
    if recipe.save.every == "off" and recipe.save.keep_at:
        yield Contradiction(("save.keep_at", "save.every"), "keeps checkpoints, but save.every: off writes none")


def batch_rules(recipe: Recipe) -> Iterator[Contradiction]:
    batch = recipe.batch
    if isinstance(batch.group, int) and batch.group > batch.size:
        text = f"{batch.group} is larger than batch.size {batch.size}"
        cures = (f"--batch-size {batch.group}", "--set batch.group=all")
        yield Contradiction(("batch.group", "batch.size"), text, cures)


def model_rules(recipe: Recipe) -> Iterator[Contradiction]:
    model, distill = recipe.model, recipe.distill
    has_weights = model.init is not None or model.resume_from is not None
    if model.freeze_backbone and not has_weights:
        text = "would train a head on a random backbone; set model.init"
        yield Contradiction(("model.freeze_backbone", "model.init"), text)
    if model.init is not None and model.resume_from is not None:
        text = "has the weights, too; set one of them"
        yield Contradiction(("model.resume_from", "model.init"), text)
    if model.trainable and not has_weights:
        text = "would leave the other weights random; set model.init"
        yield Contradiction(("model.trainable", "model.init"), text)
    if model.freeze_until != "off" and not has_weights:
        text = "would train a head on a random backbone; set model.init"
        yield Contradiction(("model.freeze_until", "model.init"), text)
    for other, is_given in (("freeze_backbone", model.freeze_backbone), ("trainable", bool(model.trainable))):
        if model.freeze_until != "off" and is_given:
            text = f"trains all parameters later, but model.{other} never does; set one of them"
            yield Contradiction(("model.freeze_until", f"model.{other}"), text)
    if model.trainable and model.freeze_backbone:
        text = "trains only the head, but model.trainable names parameters; set one of them"
        yield Contradiction(("model.freeze_backbone", "model.trainable"), text)
    loss = recipe.loss
    for name, is_given in (("bce_target_threshold", loss.bce_target_threshold is not None), ("bce_sum", loss.bce_sum)):
        if is_given and loss.name != "bce" and recipe.task == "classification":
            yield Contradiction((f"loss.{name}", "loss.name"), f"is for bce, but loss.name is {loss.name}")
    if loss.options and not names_code(loss.name):
        text = f"is for a custom loss, by import path, but loss.name is {loss.name}"
        yield Contradiction(("loss.options", "loss.name"), text)
    if names_code(loss.name) and loss.class_weights != "none":
        text = "is for cross_entropy and bce; a custom loss weighs its samples itself"
        yield Contradiction(("loss.class_weights", "loss.name"), text)
    if distill.teacher is not None and loss.name in ("auto", "cross_entropy") and loss.class_weights != "none":
        text = "divides the loss by the weights of the samples, which the loss of distill.teacher does not have"
        yield Contradiction(("loss.class_weights", "distill.teacher"), text)
    if distill.teacher_recipe is not None and distill.teacher is None:
        text = "is the recipe of a teacher, but distill.teacher is not set"
        yield Contradiction(("distill.teacher_recipe", "distill.teacher"), text)


def task_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Contradictions: settings that one task would ignore without notice."""
    if recipe.task == "detection":
        yield from _detection(recipe)
        return
    detection_only = {
        "data.source": recipe.data.source in _BOXES_ONLY,
        "augment.crop": recipe.augment.crop == "ssd",
        "augment.zoom_out.probability": recipe.augment.zoom_out.probability > 0,
    }
    for field, is_given in detection_only.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: detection")
    if recipe.task == "multilabel":
        yield from _multilabel(recipe)


def _multilabel(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.data.source not in MULTILABEL_SOURCES:
        text = f"{recipe.data.source} has one label per image; use one of {', '.join(MULTILABEL_SOURCES)}"
        yield Contradiction(("data.source", "task"), text)
    one_class_only = {
        "data.sampler": recipe.data.sampler != "random",
        "data.background_class": recipe.data.background_class,
        "loss.name": recipe.loss.name == "cross_entropy",
        "loss.smooth_over": recipe.loss.smooth_over != "all-classes",
        "distill.teacher": recipe.distill.teacher is not None,
        "metrics": bool(recipe.metrics),
    }
    for field, is_given in one_class_only.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: classification, with one class per image")


def _detection(recipe: Recipe) -> Iterator[Contradiction]:
    data, augment, expect = recipe.data, recipe.augment, recipe.expect
    if data.source not in BOX_SOURCES:
        yield Contradiction(("data.source", "task"), f"{data.source} has no boxes; use one of {', '.join(BOX_SOURCES)}")
    if data.preprocess.resize is not None:
        text = "must be null for task: detection, which uses whole images instead of center crops"
        yield Contradiction(("data.preprocess.resize", "task"), text)
    if data.background_class:
        yield Contradiction(("data.background_class", "task"), "is for task: classification; detection always has one")
    classification_only = {
        "data.preload": data.preload == "device",
        "data.sampler": data.sampler != "random",
        "augment.auto_augment": augment.auto_augment != "none",
        "augment.random_erasing.probability": augment.random_erasing.probability > 0,
        "augment.mixup.alpha": augment.mixup.enabled,
        "augment.cutmix.alpha": augment.cutmix.enabled,
        "augment.extra": bool(augment.extra),
        "metrics": bool(recipe.metrics),
        "loss.label_smoothing": recipe.loss.label_smoothing > 0,
        "loss.smooth_over": recipe.loss.smooth_over != "all-classes",
        "loss.name": recipe.loss.name == "bce",
        "loss.class_weights": recipe.loss.class_weights != "none",
        "distill.teacher": recipe.distill.teacher is not None,
        "evaluate.tta": recipe.evaluate.tta != "none",
    }
    for field, is_given in classification_only.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: classification")
    if augment.crop not in ("none", "ssd"):
        yield Contradiction(("augment.crop", "task"), f"{augment.crop} does not support boxes; use none or ssd")
    if augment.color_jitter.enabled and augment.color_jitter.implementation != "tensorflow":
        yield Contradiction(("augment.color_jitter.implementation", "task"), "must be tensorflow for task: detection")
    if augment.progressive_resizing or augment.size not in (None, data.preprocess.size):
        field = "augment.progressive_resizing" if augment.progressive_resizing else "augment.size"
        text = "is not supported for task: detection: the default boxes are made for data.preprocess.size"
        yield Contradiction((field, "task"), text)
    if expect is not None and expect.metric != recipe.detection.metric:
        text = f"{expect.metric} differs from detection.metric {recipe.detection.metric}, which decides what is best"
        yield Contradiction(("expect.metric", "detection.metric"), text)


def anchors_rules(recipe: Recipe) -> Iterator[Contradiction]:
    scales, ratios = recipe.detection.anchors.scales, recipe.detection.anchors.aspect_ratios
    if not ratios:
        text = "needs one list per feature map ([] for squares only)"
        yield Contradiction(("detection.anchors.aspect_ratios",), text)
    if len(scales) != len(ratios) + 1:
        yield Contradiction(
            ("detection.anchors.scales", "detection.anchors.aspect_ratios"),
            f"has {len(scales)} values, but the {len(ratios)} feature maps of detection.anchors.aspect_ratios need "
            f"{len(ratios) + 1}: one each and one more",
        )
    for before, after in pairwise(scales):
        if before >= after:
            yield Contradiction(("detection.anchors.scales",), f"must increase, but {after:g} follows {before:g}")
    if any(ratio == 1 for own in ratios for ratio in own):
        yield Contradiction(("detection.anchors.aspect_ratios",), "must not contain 1: every map has squares anyway")


def results_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Accuracies are fractions wherever they are expected, published or measured."""
    expect, known = recipe.expect, METRIC_NAMES[recipe.task]
    best = recipe.evaluate.best_metric
    if best is not None and recipe.task == "detection":
        yield Contradiction(("evaluate.best_metric", "task"), "is for task: classification; use detection.metric")
    elif best is not None and (best.endswith("loss") or (best not in known and not recipe.metrics)):
        text = f"{best} is neither {' nor '.join(known[:-1])}, and `metrics` names no custom one"
        text = f"{best} is better when smaller; a larger value must be better" if best.endswith("loss") else text
        yield Contradiction(("evaluate.best_metric", "metrics"), text)
    if expect is not None and expect.metric not in known and not recipe.metrics:
        text = f"{expect.metric} is not a metric of {recipe.task}, which has {join_words(known)}; null expects nothing"
        yield Contradiction(("expect.metric", "task"), text)
    results = [
        ("expect.value", expect),
        *(("published", result) for result in recipe.published),
        *(("measured", result) for result in recipe.measured),
    ]
    for field, result in results:
        if result is None or result.value is None or result.metric not in known or result.metric == "loss":
            continue
        if not 0 <= result.value <= 1:
            text = f"must be a fraction between 0 and 1; for {result.value} percent write {result.value / 100:g}"
            yield Contradiction((field,), text if field == "expect.value" else f"the value {text}")


def end_of_run_rules(recipe: Recipe) -> Iterator[Contradiction]:
    last, save_every = recipe.checkpoint_average.last, recipe.save.every
    if isinstance(last, Duration):
        if last.unit == "min":
            yield Contradiction(("checkpoint_average.last",), f"cannot be in minutes ({last})")
        if last.value == 0:
            yield Contradiction(("checkpoint_average.last",), f"must be longer than {last}; write off to switch it off")
        if save_every == "off":
            text = "averages checkpoints, but save.every: off writes none"
            yield Contradiction(("checkpoint_average.last", "save.every"), text)
        elif isinstance(save_every, Duration) and save_every.unit == "min":
            text = f"must not depend on the clock, but save.every is {save_every}"
            yield Contradiction(("checkpoint_average.last", "save.every"), text)
    stopping = recipe.early_stopping
    for name, value in (("target", stopping.target), ("patience", stopping.patience)):
        if value != "off" and recipe.evaluate.every == "off":
            text = "needs evaluations, but evaluate.every is off"
            yield Contradiction((f"early_stopping.{name}", "evaluate.every"), text)


def engine_rules(recipe: Recipe) -> Iterator[Contradiction]:
    engine = recipe.engine
    if engine.divergence.policy == "rewind" and (recipe.save.every == "off" or not recipe.save.keep_best):
        text = "needs the best checkpoint; set save.every and save.keep_best"
        yield Contradiction(("engine.divergence.policy", "save.every"), text)
    if engine.fused_kernels == "on" and engine.compile == "on":
        text = "cannot be combined with engine.compile: on; set one of them"
        yield Contradiction(("engine.fused_kernels", "engine.compile"), text)
    if engine.fused_kernels == "on" and not recipe.precision.follows_autocast:
        text = "needs a precision.mode and precision.ops that leave each operation's dtype to torch"
        yield Contradiction(("engine.fused_kernels", "precision.mode"), text)
    if engine.cudnn_benchmark == "on" and engine.deterministic:
        text = "may choose another algorithm in each run, but engine.deterministic needs the same one"
        yield Contradiction(("engine.cudnn_benchmark", "engine.deterministic"), text)
    if engine.verify != "off":
        yield from _verify_rules(recipe)
    if recipe.profile != "off" and recipe.profile[0] > recipe.profile[1]:
        text = f"ends at step {recipe.profile[1]}, before its first step {recipe.profile[0]}"
        yield Contradiction(("profile",), text)
    if len(set(recipe.loggers)) < len(recipe.loggers):
        yield Contradiction(("loggers",), f"contains a duplicate: {', '.join(recipe.loggers)}")


def _verify_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Find what cannot be computed again with the same bits from a copy of the state."""
    not_supported = {
        "engine.cudnn_benchmark": (
            recipe.engine.cudnn_benchmark == "on",
            "may choose another algorithm on each device",
        ),
        "parallel.pipeline_stages": (recipe.parallel.pipeline_stages > 1, "no rank has the whole model"),
        "memory.shard_optimizer": (recipe.memory.shard_optimizer, "each rank has another part of the state"),
        "memory.offload_optimizer": (recipe.memory.offload_optimizer, "the state is not on one device"),
        "data.preload": (recipe.data.preload == "device", "images on the device have no digests"),
        "model.freeze_until": (recipe.model.freeze_until != "off", "the run could not go back past that step"),
    }
    for other, (is_given, why) in not_supported.items():
        if is_given:
            yield Contradiction((other, "engine.verify"), f"is not supported with engine.verify: {why}")


def precision_rules(recipe: Recipe) -> Iterator[Contradiction]:
    precision, ops = recipe.precision, recipe.precision.ops
    low_precision = "modes with a dtype below fp32"
    given = {
        "loss_scale": (precision.loss_scale != "dynamic", precision.uses_loss_scale, "fp16, 16.16 and 16.32"),
        "rounding": (precision.rounding != "auto", precision.mode == "16.16", "16.16, with half-precision weights"),
        "ops": (bool(ops.float32 or ops.low_precision), precision.has_low_precision, low_precision),
        "reduced_precision_reduction": (
            precision.reduced_precision_reduction == "on",
            precision.has_low_precision,
            low_precision,
        ),
    }
    for name, (is_given, is_used, modes) in given.items():
        if is_given and not is_used:
            text = f"is for {modes}, but precision.mode is {precision.mode}"
            yield Contradiction((f"precision.{name}", "precision.mode"), text)
    for name in sorted(set(ops.float32) & set(ops.low_precision)):
        text = f"{name} is in precision.ops.low_precision, too; remove one of them"
        yield Contradiction(("precision.ops.float32", "precision.ops.low_precision"), text)
    for name in sorted(set(ops.low_precision) & {"cross_entropy", "nll_loss"}):
        yield Contradiction(("precision.ops.low_precision",), f"cannot contain {name}: the loss is always float32")


def memory_rules(recipe: Recipe) -> Iterator[Contradiction]:
    memory, compiles = recipe.memory, recipe.engine.compile == "on"
    checkpoints = memory.activation_checkpointing != "off"
    if memory.activation_checkpointing == ():
        yield Contradiction(("memory.activation_checkpointing",), "names no stage; write off to switch it off")
    if checkpoints and compiles:
        yield Contradiction(
            ("memory.activation_checkpointing", "engine.compile"),
            "cannot be combined with engine.compile: on, which chooses what to recompute itself",
        )
    for field, is_given in (("memory.activation_checkpointing", checkpoints), ("engine.compile", compiles)):
        if memory.checkpoint_segments and is_given:
            text = "cannot be combined with memory.checkpoint_segments, which chooses what to recompute"
            yield Contradiction((field, "memory.checkpoint_segments"), text)
    if memory.shard_optimizer and recipe.precision.mode == "16.16":
        yield Contradiction(("memory.shard_optimizer", "precision.mode"), "is not supported with precision.mode 16.16")
    if recipe.optimizer.momentum == 0 and recipe.optimizer.name in ("sgd", "lars"):
        for name in ("shard_optimizer", "offload_optimizer"):
            if getattr(memory, name):
                text = "has no effect: without optimizer.momentum the optimizer has no state"
                yield Contradiction((f"memory.{name}", "optimizer.momentum"), text)
    if recipe.engine.cuda_graphs == "on" and memory.offload_optimizer:
        text = "copies from host memory, which engine.cuda_graphs: on cannot capture"
        yield Contradiction(("memory.offload_optimizer", "engine.cuda_graphs"), text)


def pipeline_rules(recipe: Recipe) -> Iterator[Contradiction]:
    field, parallel = "parallel.pipeline_stages", recipe.parallel
    if parallel.pipeline_stages == 1:
        if parallel.pipeline_splits:
            yield Contradiction(
                ("parallel.pipeline_splits", field),
                f"splits the model over the devices of a pipeline, but {field} is 1; to recompute activations "
                "segment by segment on one device use memory.checkpoint_segments",
            )
        return
    if len(parallel.pipeline_splits) >= parallel.pipeline_stages:
        yield Contradiction(
            ("parallel.pipeline_splits", field),
            f"names {len(parallel.pipeline_splits)} stages, but {parallel.pipeline_stages} devices need "
            f"{parallel.pipeline_stages - 1}; several parts per device are not supported",
        )
    engine, memory, model = recipe.engine, recipe.memory, recipe.model
    frozen = "a frozen part has no gradients to send"
    not_supported = {
        "task": (recipe.task == "detection", "only classification is supported"),
        "parallel.reduce": (parallel.reduce == "ordered", "gradients cannot be summed group by group; use fast"),
        "parallel.gradient_compression": (parallel.gradient_compression != "off", "gradients are not compressed"),
        "memory.activation_checkpointing": (memory.activation_checkpointing != "off", "activations are kept"),
        "memory.checkpoint_segments": (bool(memory.checkpoint_segments), "activations are kept"),
        "engine.compile": (engine.compile == "on", "parts of a model are not compiled"),
        "engine.fused_kernels": (engine.fused_kernels == "on", "fused blocks pass on more than one tensor"),
        "engine.cuda_graphs": (engine.cuda_graphs == "on", "a pipeline cannot be captured"),
        "distill.teacher": (recipe.distill.teacher is not None, "the teacher is not split"),
        "model.freeze_backbone": (model.freeze_backbone, frozen),
        "model.freeze_until": (model.freeze_until != "off", frozen),
        "model.trainable": (bool(model.trainable), frozen),
        "data.bad_images": (recipe.data.bad_images.limit > 0, "several processes would count the same file"),
        "batch.group": (recipe.batch.group == "micro", "groups must not depend on the devices; give a size"),
    }
    for other, (is_given, why) in not_supported.items():
        if is_given:
            yield Contradiction((other, field), f"is not supported with {field} above 1: {why}")
