"""Which combinations of recipe fields are invalid, as far as that shows without the data.

All contradictions of a recipe are reported at once, each with the fields it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.code_fields import names_code
from reconv.recipe.data_fields import why_not_gpu
from reconv.recipe.units import Duration

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

_COMMON = ("name", "lr", "base_batch_size", "warmup")
_WITH_WARMUP = (*_COMMON, "interval", "warmup_from")
_DECAYING = (*_WITH_WARMUP, "warmup_mode", "end_lr", "end_lr_ratio", "decay_until")
SCHEDULE_FIELDS: Mapping[str, tuple[str, ...]] = {  # the fields each schedule uses
    "constant": _WITH_WARMUP,
    "cosine": _DECAYING,
    "linear": _DECAYING,
    "polynomial": (*_DECAYING, "power"),
    "step": (*_WITH_WARMUP, "warmup_mode", "period", "gamma"),
    "multistep": (*_WITH_WARMUP, "warmup_mode", "milestones", "milestone_when", "gamma"),
    "piecewise": (*_WITH_WARMUP, "warmup_mode", "milestones", "milestone_when", "milestone_lrs"),
    "exponential": (*_WITH_WARMUP, "warmup_mode", "period", "num_periods", "staircase", "gamma"),
    "one-cycle": (
        *_COMMON,
        "end_lr",
        "end_lr_ratio",
        "start_lr_ratio",
        "anneal_strategy",
    ),  # by epochs it misses its peak
}
BOX_SOURCES = ("auto", "coco", "voc", "yolo", "tfrecord", "scattered-digits", "synthetic", "synthetic-device")
MULTILABEL_SOURCES = ("auto", "csv", "synthetic", "synthetic-device")
_BOXES_ONLY = ("coco", "voc", "yolo", "scattered-digits")
_METRICS = {
    "classification": ("top1", "top5", "loss"),
    "multilabel": ("map", "micro_f1", "macro_f1", "loss"),
    "detection": (
        *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
        *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
        *("voc07", "voc10"),
    ),
}


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Fields whose values do not go together, or one whose value makes no sense."""

    fields: tuple[str, ...]  # dotted names; the message begins with the first
    text: str
    cures: tuple[str, ...] = ()  # options, each of which resolves it


class ContradictionError(ValueError):
    """All contradictions of one recipe."""

    def __init__(self, found: Sequence[Contradiction]) -> None:
        super().__init__("; ".join(f"{c.fields[0]}: {c.text}" for c in found))
        self.found = tuple(found)


def contradictions(recipe: Recipe) -> list[Contradiction]:
    """Every contradiction between the fields of a recipe."""
    rules = (
        *(_durations, _model, _data, _augment, _color_jitter, _task, _anchors, _batch, _schedule, _optimizer),
        *(_end_of_run, _engine, _precision, _results, _memory, _pipeline),
    )
    return [contradiction for rule in rules for contradiction in rule(recipe)]


def _durations(recipe: Recipe) -> Iterator[Contradiction]:
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


def _model(recipe: Recipe) -> Iterator[Contradiction]:
    model, distill = recipe.model, recipe.distill
    if model.freeze_backbone and model.init is None:
        text = "would train a head on a random backbone; set model.init"
        yield Contradiction(("model.freeze_backbone", "model.init"), text)
    if model.trainable and model.init is None:
        text = "would leave the other weights random; set model.init"
        yield Contradiction(("model.trainable", "model.init"), text)
    if model.freeze_until != "off" and model.init is None:
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
        text = f"is for your own loss, by import path, but loss.name is {loss.name}"
        yield Contradiction(("loss.options", "loss.name"), text)
    if names_code(loss.name) and loss.class_weights != "none":
        text = "is for cross_entropy and bce; your own loss weighs its samples itself"
        yield Contradiction(("loss.class_weights", "loss.name"), text)
    if distill.teacher is not None and loss.name in ("auto", "cross_entropy") and loss.class_weights != "none":
        text = "divides the loss by the weights of the samples, which the loss of distill.teacher does not have"
        yield Contradiction(("loss.class_weights", "distill.teacher"), text)
    if distill.teacher_recipe is not None and distill.teacher is None:
        text = "is the recipe of a teacher, but distill.teacher is not set"
        yield Contradiction(("distill.teacher_recipe", "distill.teacher"), text)


def _data(recipe: Recipe) -> Iterator[Contradiction]:
    data, preprocess = recipe.data, recipe.data.preprocess
    if data.background_class and data.source == "synthetic-device":
        text = "is not supported for data.source synthetic-device"
        yield Contradiction(("data.background_class", "data.source"), text)
    for name, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) != preprocess.channels:
            yield Contradiction(
                (f"data.preprocess.{name}", "data.preprocess.channels"),
                f"has {len(values)} {'value' if len(values) == 1 else 'values'}, "
                f"but data.preprocess.channels is {preprocess.channels}",
            )
    if isinstance(preprocess.resize, int) and preprocess.resize < preprocess.size:
        yield Contradiction(
            ("data.preprocess.resize", "data.preprocess.size"),
            f"{preprocess.resize} is too small for a crop of data.preprocess.size {preprocess.size}",
        )
    if data.options and not names_code(data.source):
        text = f"is for your own dataset, by import path, but data.source is {data.source}"
        yield Contradiction(("data.options", "data.source"), text)
    yield from _mean(recipe)
    yield from _backend(recipe)
    is_synthetic = data.source.startswith("synthetic")
    if data.num_samples is not None and not is_synthetic and data.source != "scattered-digits":
        text = f"is for synthetic data and scattered-digits, but data.source is {data.source}"
        yield Contradiction(("data.num_samples", "data.source"), text)
    if data.num_classes is not None and not is_synthetic:
        text = f"is for synthetic data, but data.source is {data.source}"
        yield Contradiction(("data.num_classes", "data.source"), text)


def _backend(recipe: Recipe) -> Iterator[Contradiction]:
    data = recipe.data
    if data.backend == "gpu":
        is_detection = recipe.task == "detection"
        why = (
            "images with boxes are decoded on the CPU" if is_detection else why_not_gpu(recipe.augment, data.preprocess)
        )
        if why is not None:
            yield Contradiction(("data.backend",), f"gpu cannot be used: {why}; use auto or processes")
    if data.backend == "dali":
        text = "dali is not supported: it takes 0.7 GB of packages and is no faster on the CPU than threads; use auto"
        yield Contradiction(("data.backend",), text)
    uses_processes = data.backend in ("processes", "gpu")
    if uses_processes and data.num_workers == 0:
        yield Contradiction(("data.backend", "data.num_workers"), f"{data.backend} needs data.num_workers above 0")
    if uses_processes and data.cache == "ram":
        text = f"ram is a cache within one process, but data.backend {data.backend} reads in several"
        yield Contradiction(("data.cache", "data.backend"), text)
    if data.transfer_dtype != "uint8" and data.preload == "device":
        text = "has no effect with data.preload: device, which copies the images once"
        yield Contradiction(("data.transfer_dtype", "data.preload"), text)


def _mean(recipe: Recipe) -> Iterator[Contradiction]:
    preprocess = recipe.data.preprocess
    fields = ("data.preprocess.mean", "data.preprocess.divide_by")
    largest, limit = max(preprocess.mean, default=0), 255 / preprocess.divide_by
    if preprocess.per_image_standardization:
        return
    if largest > limit:
        text = f"{largest:g} is above {limit:g}, the largest pixel value after data.preprocess.divide_by"
        yield Contradiction(fields, text)
    elif preprocess.divide_by == 1 and 0 < largest <= 1:
        text = f"{largest:g} is a mean of pixels from 0 to 1, but data.preprocess.divide_by 1 keeps them at 0 to 255"
        yield Contradiction(fields, text)


def _augment(recipe: Recipe) -> Iterator[Contradiction]:
    augment = recipe.augment
    ranges = {
        "scale": augment.scale,
        "ratio": augment.ratio,
        "random_erasing.scale": augment.random_erasing.scale,
        "random_erasing.ratio": augment.random_erasing.ratio,
        "ssd_crop.scale": augment.ssd_crop.scale,
    }
    for name, (low, high) in ranges.items():
        if low > high:
            yield Contradiction((f"augment.{name}",), f"must be [smallest, largest], not [{low}, {high}]")
    for (before, _), (after, _) in pairwise(augment.progressive_resizing):
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("augment.progressive_resizing",), f"must increase, but {after} follows {before}")
    if augment.crop == "random" and augment.padding_mode == "reflect":
        sizes = [augment.size or recipe.data.preprocess.size, *(size for _, size in augment.progressive_resizing)]
        if augment.padding >= min(sizes):
            yield Contradiction(
                ("augment.padding", "augment.padding_mode"),
                f"{augment.padding} must be smaller than the image ({min(sizes)} px) for augment.padding_mode reflect",
            )
    if augment.train_like_eval:
        excluded = {
            "auto_augment": augment.auto_augment != "none",
            "color_jitter": augment.color_jitter.enabled,
            "random_erasing.probability": augment.random_erasing.probability > 0,
            "zoom_out.probability": augment.zoom_out.probability > 0,
            "repeats": augment.repeats > 1,
            "extra": bool(augment.extra),
        }
        text = "changes training images, but augment.train_like_eval prepares them like evaluation images"
        for name in (name for name, is_on in excluded.items() if is_on):
            yield Contradiction((f"augment.{name}", "augment.train_like_eval"), text)
    rand = augment.randaugment
    if rand.implementation == "timm" and rand.magnitude > 10:
        text = f"{rand.magnitude} is above 10, the largest magnitude of timm"
        yield Contradiction(("augment.randaugment.magnitude", "augment.randaugment.implementation"), text)
    if rand.implementation != "timm" and rand.magnitude_std > 0:
        text = f"is for timm, but augment.randaugment.implementation is {rand.implementation}"
        yield Contradiction(("augment.randaugment.magnitude_std", "augment.randaugment.implementation"), text)
    if recipe.data.preprocess.channels == 1:
        for name in ("saturation", "hue"):
            if getattr(augment.color_jitter, name) > 0:
                text = "needs color images, but data.preprocess.channels is 1"
                fields = (f"augment.color_jitter.{name}", "data.preprocess.channels")
                yield Contradiction(fields, text, (f"--set {fields[0]}=0",))
    yield from _mixing(recipe)


def _mixing(recipe: Recipe) -> Iterator[Contradiction]:
    augment, cutmix, batch = recipe.augment, recipe.augment.cutmix, recipe.batch
    if cutmix.mode == "beta" and cutmix.lam < 1:
        text = "is for augment.cutmix.mode fixed and random; beta uses alpha"
        yield Contradiction(("augment.cutmix.lam", "augment.cutmix.mode"), text)
    if cutmix.mode != "beta" and cutmix.alpha > 0:
        text = f"is for augment.cutmix.mode beta; {cutmix.mode} uses lam"
        yield Contradiction(("augment.cutmix.alpha", "augment.cutmix.mode"), text)
    if augment.combine == "both" and not (augment.mixup.enabled and cutmix.enabled):
        yield Contradiction(
            ("augment.combine", "augment.mixup.alpha", "augment.cutmix.alpha", "augment.cutmix.lam"),
            "both needs augment.mixup and augment.cutmix enabled",
        )
    if not augment.mixes:
        return
    fields = ("augment.mixup.alpha",) if augment.mixup.enabled else ("augment.cutmix.alpha", "augment.cutmix.lam")
    group = batch.group if isinstance(batch.group, int) else batch.size
    smallest = 2 if not cutmix.enabled else max(2, cutmix.roll + 1)
    if group >= smallest:
        return
    larger = f"--batch-size {max(smallest, batch.size)}"
    if isinstance(batch.group, int):
        larger += f" --set batch.group={smallest}"
    off = [
        *(["--set augment.mixup.alpha=0"] if augment.mixup.enabled else []),
        *(["--set augment.cutmix.alpha=0"] if cutmix.enabled and cutmix.mode == "beta" else []),
        *(["--set augment.cutmix.lam=1"] if cutmix.enabled and cutmix.mode != "beta" else []),
        *(["--set augment.combine=one-of"] if augment.combine == "both" else []),
    ]
    cures = [larger, " ".join(off)]
    if group == 1:
        text = "needs groups of at least two samples"
        yield Contradiction((*fields, "batch.group", "batch.size"), text, tuple(cures))
    else:
        text = f"{cutmix.roll} must be smaller than the group of {group} samples"
        cures.append(f"--set augment.cutmix.roll={group - 1}")
        yield Contradiction(("augment.cutmix.roll", "batch.group", "batch.size"), text, tuple(cures))


def _color_jitter(recipe: Recipe) -> Iterator[Contradiction]:
    jitter = recipe.augment.color_jitter
    if jitter.enabled and jitter.implementation == "tensorflow" and recipe.data.preprocess.per_image_standardization:
        yield Contradiction(
            ("augment.color_jitter.implementation", "data.preprocess.per_image_standardization"),
            "tensorflow does not round pixel values, but data.preprocess.per_image_standardization needs whole ones",
        )


def _task(recipe: Recipe) -> Iterator[Contradiction]:
    """What one task would ignore without notice is a contradiction."""
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


def _anchors(recipe: Recipe) -> Iterator[Contradiction]:
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


def _batch(recipe: Recipe) -> Iterator[Contradiction]:
    batch = recipe.batch
    if isinstance(batch.group, int) and batch.group > batch.size:
        text = f"{batch.group} is larger than batch.size {batch.size}"
        cures = (f"--batch-size {batch.group}", "--set batch.group=all")
        yield Contradiction(("batch.group", "batch.size"), text, cures)


def _schedule(recipe: Recipe) -> Iterator[Contradiction]:
    schedule, length = recipe.schedule, recipe.length
    yield from _unused_by_schedule(recipe)
    needs = {
        "step": ("period", "30ep", schedule.period is None),
        "multistep": ("milestones", "[30ep, 60ep]", not schedule.milestones),
        "one-cycle": ("warmup", "30%", schedule.warmup.value == 0),
    }
    field, example, is_missing = needs.get(schedule.name, ("", "", False))
    if is_missing:
        text = f"{schedule.name} needs schedule.{field}, as in {example}"
        yield Contradiction(("schedule.name", f"schedule.{field}"), text)
    if schedule.name == "piecewise":
        yield from _piecewise(recipe)
    if schedule.name == "exponential" and schedule.num_periods is not None and schedule.period is not None:
        text = "sets the period, as schedule.period does; remove one of them"
        yield Contradiction(("schedule.num_periods", "schedule.period"), text)
    if schedule.end_lr_ratio is not None and schedule.end_lr > 0:
        text = "sets the final learning rate, as schedule.end_lr does; remove one of them"
        yield Contradiction(("schedule.end_lr_ratio", "schedule.end_lr"), text)
    for before, after in pairwise(schedule.milestones):
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("schedule.milestones",), f"must increase, but {after} follows {before}")
    if schedule.warmup.unit == length.unit and schedule.warmup.value > length.value:
        longer = f"--epochs {schedule.warmup.value:g}" if length.unit == "ep" else f"--set length={schedule.warmup}"
        yield Contradiction(
            ("schedule.warmup", "length"),
            f"{schedule.warmup} is longer than the run (length {length})",
            (longer, f"--set schedule.warmup={length}", "--set schedule.warmup=5%"),
        )


def _unused_by_schedule(recipe: Recipe) -> Iterator[Contradiction]:
    """Fields that the schedule does not use and that are not at their default."""
    schedule = recipe.schedule
    defaults = type(schedule)()
    for name in type(schedule).model_fields:
        if name not in SCHEDULE_FIELDS[schedule.name] and getattr(schedule, name) != getattr(defaults, name):
            users = [schedule_name for schedule_name, used in SCHEDULE_FIELDS.items() if name in used]
            text = f"is for {_and(users)}, but schedule.name is {schedule.name}"
            yield Contradiction((f"schedule.{name}", "schedule.name"), text)


def _piecewise(recipe: Recipe) -> Iterator[Contradiction]:
    schedule = recipe.schedule
    num_rates, num_milestones = len(schedule.milestone_lrs), len(schedule.milestones)
    if num_rates == 0:
        text = "piecewise needs schedule.milestone_lrs, one for each milestone; schedule.lr applies before the first"
        yield Contradiction(("schedule.name", "schedule.milestone_lrs"), text)
    elif num_rates != num_milestones:
        text = f"has {num_rates} values, but schedule.milestones has {num_milestones}; it needs one for each"
        yield Contradiction(("schedule.milestone_lrs", "schedule.milestones"), text)
    if not schedule.uses_lr and schedule.lr not in (type(schedule)().lr, *schedule.milestone_lrs[:1]):
        scale = schedule.lr / max(schedule.milestone_lrs)
        rates = ", ".join(f"{scale * rate:.4g}" for rate in schedule.milestone_lrs)
        yield Contradiction(
            ("schedule.lr", "schedule.milestone_lrs", "schedule.milestones"),
            f"{schedule.lr:g} has no effect: the first milestone is {schedule.milestones[0]}, "
            "and from there schedule.milestone_lrs apply",
            (
                f"--lr {scale * schedule.milestone_lrs[0]:.4g} --set 'schedule.milestone_lrs=[{rates}]'",
                "--set schedule.name=constant",
                "--set schedule.name=cosine",
            ),
        )


def _and(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _optimizer(recipe: Recipe) -> Iterator[Contradiction]:
    optimizer = recipe.optimizer
    if optimizer.nesterov and optimizer.momentum == 0:
        yield Contradiction(("optimizer.nesterov", "optimizer.momentum"), "needs optimizer.momentum above 0")
    is_rmsprop, is_lars = optimizer.name.startswith("rmsprop"), optimizer.name == "lars"
    is_adam = optimizer.name in ("adamw", "lamb")
    given = {
        "nesterov": (optimizer.nesterov, optimizer.name in ("sgd", "lars"), "sgd and lars"),
        "betas": (optimizer.betas != (0.9, 0.999), is_adam, "adamw and lamb"),
        "alpha": (optimizer.alpha != 0.9, is_rmsprop, "rmsprop"),
        "alpha_exponent": (optimizer.alpha_exponent is not None, is_rmsprop, "rmsprop"),
        "eps": (optimizer.eps != "auto", optimizer.name != "sgd", "rmsprop, lars, adamw and lamb"),
        "trust_coefficient": (optimizer.trust_coefficient != 0.001, is_lars, "lars"),
        "lars_exclude": (optimizer.lars_exclude != "norm-bias", is_lars, "lars"),
        "implementation": (
            optimizer.implementation == "fused",
            optimizer.name in ("sgd", "lars", "adamw"),
            "sgd, lars and adamw when fused",
        ),
        "norm_bias_lr_scale": (optimizer.norm_bias_lr_scale != 1, optimizer.name == "sgd", "sgd"),
    }
    for name, (is_given, is_used, users) in given.items():
        if is_given and not is_used:
            text = f"is for {users}, but optimizer.name is {optimizer.name}"
            yield Contradiction((f"optimizer.{name}", "optimizer.name"), text)
    if optimizer.alpha_exponent is not None and optimizer.alpha != 0.9:
        text = "sets alpha, as optimizer.alpha does; remove one of them"
        yield Contradiction(("optimizer.alpha_exponent", "optimizer.alpha"), text)
    if optimizer.clip_grad == "auto" and optimizer.clip_mode != "norm":
        text = f"{optimizer.clip_mode} needs a number in optimizer.clip_grad, as in 0.01 for agc"
        yield Contradiction(("optimizer.clip_mode", "optimizer.clip_grad"), text)
    if is_lars and optimizer.weight_decay_exclude not in ("none", optimizer.lars_exclude):
        yield Contradiction(
            ("optimizer.weight_decay_exclude", "optimizer.lars_exclude"),
            f"{optimizer.weight_decay_exclude} differs from optimizer.lars_exclude ({optimizer.lars_exclude}), "
            "which lars does not decay; remove it",
            ("--set optimizer.weight_decay_exclude=none",),
        )


def _end_of_run(recipe: Recipe) -> Iterator[Contradiction]:
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


def _engine(recipe: Recipe) -> Iterator[Contradiction]:
    engine = recipe.engine
    if engine.fused_kernels == "on" and engine.compile == "on":
        text = "cannot be combined with engine.compile: on; set one of them"
        yield Contradiction(("engine.fused_kernels", "engine.compile"), text)
    if engine.fused_kernels == "on" and not recipe.precision.follows_autocast:
        text = "needs a precision.mode and precision.ops that leave each operation's dtype to torch"
        yield Contradiction(("engine.fused_kernels", "precision.mode"), text)
    if engine.cudnn_benchmark == "on" and engine.deterministic:
        text = "may choose another algorithm in each run, but engine.deterministic promises the same bits"
        yield Contradiction(("engine.cudnn_benchmark", "engine.deterministic"), text)
    if recipe.profile != "off" and recipe.profile[0] > recipe.profile[1]:
        text = f"ends at step {recipe.profile[1]}, before its first step {recipe.profile[0]}"
        yield Contradiction(("profile",), text)
    if len(set(recipe.loggers)) < len(recipe.loggers):
        yield Contradiction(("loggers",), f"contains a duplicate: {', '.join(recipe.loggers)}")


def _precision(recipe: Recipe) -> Iterator[Contradiction]:
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


def _results(recipe: Recipe) -> Iterator[Contradiction]:
    """Accuracies are fractions wherever they are expected, published or measured."""
    expect, known = recipe.expect, _METRICS[recipe.task]
    best = recipe.evaluate.best_metric
    if best is not None and recipe.task == "detection":
        yield Contradiction(("evaluate.best_metric", "task"), "is for task: classification; use detection.metric")
    elif best is not None and (best.endswith("loss") or (best not in known and not recipe.metrics)):
        text = f"{best} is neither {' nor '.join(known[:-1])}, and `metrics` has none of your own"
        text = f"{best} is better when smaller; a larger value must be better" if best.endswith("loss") else text
        yield Contradiction(("evaluate.best_metric", "metrics"), text)
    if expect is not None and expect.metric not in known and not recipe.metrics:
        text = f"{expect.metric} is not a metric of {recipe.task}, which has {_and(known)}; null expects nothing"
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


def _memory(recipe: Recipe) -> Iterator[Contradiction]:
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


def _pipeline(recipe: Recipe) -> Iterator[Contradiction]:
    field, parallel = "parallel.pipeline_stages", recipe.parallel
    if parallel.pipeline_stages == 1:
        if parallel.pipeline_splits:
            yield Contradiction(
                ("parallel.pipeline_splits", field),
                f"splits the network over the devices of a pipeline, but {field} is 1; to recompute activations "
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
        "engine.compile": (engine.compile == "on", "parts of a network are not compiled"),
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
