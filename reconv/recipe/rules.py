"""What the fields of a recipe say about each other: every contradiction that can be seen without data.

Owns the rules between fields. Refuses to know types and ranges (schema), files (load) and derived numbers (plan).
Invariant: all contradictions of a recipe are found at once, each with the fields it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.box_rules import box_contradictions
from reconv.recipe.contradiction import Contradiction
from reconv.recipe.data_fields import why_not_gpu
from reconv.recipe.detection_rules import detection_contradictions
from reconv.recipe.memory_rules import memory_contradictions
from reconv.recipe.pipeline_rules import pipeline_contradictions
from reconv.recipe.units import Duration

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


_EVERY_KIND = ("name", "lr", "base_batch_size", "warmup")
_RISING = (*_EVERY_KIND, "interval", "warmup_from")  # warm-up before a curve
_FALLING = (*_RISING, "warmup_mode", "end_lr", "end_lr_ratio", "decay_until")
SCHEDULE_FIELDS: Mapping[str, tuple[str, ...]] = {  # what each kind of schedule uses
    "constant": _RISING,
    "cosine": _FALLING,
    "linear": _FALLING,
    "polynomial": (*_FALLING, "power"),
    "step": (*_RISING, "warmup_mode", "period", "gamma"),
    "multistep": (*_RISING, "warmup_mode", "milestones", "milestone_when", "gamma"),
    "piecewise": (*_RISING, "warmup_mode", "milestones", "milestone_when", "milestone_lrs"),
    "exponential": (*_RISING, "warmup_mode", "period", "num_periods", "staircase", "gamma"),
    "one-cycle": (
        *_EVERY_KIND,
        "end_lr",
        "end_lr_ratio",
        "start_lr_ratio",
        "anneal_strategy",
    ),  # by epochs it would miss its peak
}
_METRICS = {  # what the evaluations of a task report
    "classification": ("top1", "top5", "loss"),
    "detection": (
        *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
        *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
        *("voc07", "voc10"),
    ),
}


def contradictions(recipe: Recipe) -> list[Contradiction]:
    """Every contradiction between the recipe's fields."""
    of_detection = (box_contradictions, detection_contradictions)
    rules = (_durations, _model, _data, _augment, *of_detection, _batch, _schedule, _optimizer, _ending, _rest)
    return [c for rule in (*rules, memory_contradictions, pipeline_contradictions) for c in rule(recipe)]


def _durations(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.length.unit not in ("ep", "step"):
        yield Contradiction(("length",), f"is in ep or step, not {recipe.length}")
    intervals = {
        "evaluate.every": recipe.evaluate.every,
        "save.every": recipe.save.every,
        "log.every": recipe.log.every,
    }
    lengths = {
        "length": recipe.length,
        "schedule.period": recipe.schedule.period,
        "schedule.decay_until": recipe.schedule.decay_until,
        **intervals,
    }
    for field, duration in lengths.items():
        if isinstance(duration, Duration) and duration.value == 0:
            instead = "; to switch it off: off" if field in ("evaluate.every", "save.every") else ""
            yield Contradiction((field,), f"must be longer than {duration}{instead}")
    clockless: list[tuple[str, Duration | str | None]] = [
        ("schedule.warmup", recipe.schedule.warmup),
        ("schedule.period", recipe.schedule.period),
        ("schedule.decay_until", recipe.schedule.decay_until),
        ("evaluate.every", recipe.evaluate.every),
        ("evaluate.offset", recipe.evaluate.offset),
        ("log.every", recipe.log.every),
        *(("schedule.milestones", milestone) for milestone in recipe.schedule.milestones),
        *(("save.keep_at", pin) for pin in recipe.save.keep_at),
        *(("augment.progressive_resizing", start) for start, _ in recipe.augment.progressive_resizing),
    ]
    for field, typed in clockless:
        if isinstance(typed, Duration) and typed.unit == "min":
            yield Contradiction((field,), f"cannot be in minutes ({typed}): it must not depend on the clock")
    if recipe.save.every == "off" and recipe.save.keep_at:
        yield Contradiction(("save.keep_at", "save.every"), "has checkpoints to keep, but save.every: off writes none")


def _model(recipe: Recipe) -> Iterator[Contradiction]:
    model, distill = recipe.model, recipe.distill
    if model.freeze_backbone and model.init is None:
        yield Contradiction(
            ("model.freeze_backbone", "model.init"), "would train a head on random weights; it needs model.init"
        )
    if model.trainable and model.init is None:
        yield Contradiction(("model.trainable", "model.init"), "leaves the other weights random; it needs model.init")
    if model.trainable and model.freeze_backbone:
        yield Contradiction(
            ("model.freeze_backbone", "model.trainable"), "trains the head alone, but model.trainable names parameters"
        )
    if distill.teacher_recipe is not None and distill.teacher is None:
        yield Contradiction(
            ("distill.teacher_recipe", "distill.teacher"), "is a teacher's, but distill.teacher names none"
        )


def _data(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.data.background_class and recipe.data.source == "synthetic-device":
        yield Contradiction(
            ("data.background_class", "data.source"), "images made on the device have no background class"
        )
    data, preprocess = recipe.data, recipe.data.preprocess
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
            f"{preprocess.resize} leaves no room for a crop of data.preprocess.size {preprocess.size}",
        )
    yield from _mean(recipe)
    yield from _backend(recipe)
    made_up = data.source.startswith("synthetic")
    if data.num_samples is not None and not made_up and data.source != "scattered-digits":
        text = f"is for synthetic data and scattered-digits, but data.source is {data.source}"
        yield Contradiction(("data.num_samples", "data.source"), text)
    if data.num_classes is not None and not made_up:
        text = f"is for synthetic data, but data.source is {data.source}"
        yield Contradiction(("data.num_classes", "data.source"), text)


def _backend(recipe: Recipe) -> Iterator[Contradiction]:
    data, fields = recipe.data, ("data.backend",)
    if data.backend == "gpu" and (why := _why_not_gpu(recipe)) is not None:
        yield Contradiction(fields, f"gpu has nothing to do: {why}; use auto or processes")
    if data.backend == "dali":
        yield Contradiction(
            fields, "dali is not offered: 0.7 GB of packages, and no faster on the CPU than threads; use auto"
        )
    in_processes = data.backend in ("processes", "gpu")
    if in_processes and data.num_workers == 0:
        yield Contradiction(("data.backend", "data.num_workers"), f"{data.backend} needs data.num_workers above 0")
    if in_processes and data.cache == "ram":
        yield Contradiction(
            ("data.cache", "data.backend"), f"ram is of one process, but data.backend {data.backend} reads in several"
        )
    if data.transfer_dtype != "uint8" and data.preload == "device":
        yield Contradiction(
            ("data.transfer_dtype", "data.preload"), "is how images travel, but data.preload: device moves them once"
        )


def _why_not_gpu(recipe: Recipe) -> str | None:
    if recipe.task == "detection":
        return "images with boxes are made by the host"
    return why_not_gpu(recipe.augment, recipe.data.preprocess)


def _mean(recipe: Recipe) -> Iterator[Contradiction]:
    preprocess = recipe.data.preprocess
    fields = ("data.preprocess.mean", "data.preprocess.divide_by")
    highest, most = max(preprocess.mean, default=0), 255 / preprocess.divide_by
    if preprocess.per_image_standardization:
        return
    if highest > most:
        yield Contradiction(
            fields, f"{highest:g} is above {most:g}, the brightest pixel divided by data.preprocess.divide_by"
        )
    elif preprocess.divide_by == 1 and 0 < highest <= 1:
        yield Contradiction(
            fields, f"{highest:g} is a mean of 0 to 1, but data.preprocess.divide_by 1 leaves pixels at 0 to 255"
        )


def _augment(recipe: Recipe) -> Iterator[Contradiction]:
    augment = recipe.augment
    bounds = {"scale": augment.scale, "ratio": augment.ratio}
    bounds |= {
        "random_erasing.scale": augment.random_erasing.scale,
        "random_erasing.ratio": augment.random_erasing.ratio,
    }
    for name, (low, high) in bounds.items():
        if low > high:
            yield Contradiction((f"augment.{name}",), f"goes from the smaller to the larger, not {low} to {high}")
    for (before, _), (after, _) in pairwise(augment.progressive_resizing):
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("augment.progressive_resizing",), f"must rise, but {after} follows {before}")
    extras = {
        "auto_augment": augment.auto_augment != "none",
        "color_jitter": augment.color_jitter.on,
        "random_erasing.probability": augment.random_erasing.probability > 0,
        "zoom_out.probability": augment.zoom_out.probability > 0,
    }
    if augment.crop == "random" and augment.padding_mode == "reflect":
        smallest = min(
            [augment.size or recipe.data.preprocess.size, *(size for _, size in augment.progressive_resizing)]
        )
        if augment.padding >= smallest:
            yield Contradiction(
                ("augment.padding", "augment.padding_mode"),
                f"{augment.padding} is more than an image of {smallest} px can reflect; it needs one pixel less",
            )
    if augment.train_like_eval:
        for name in (name for name, is_on in extras.items() if is_on):
            yield Contradiction(
                (f"augment.{name}", "augment.train_like_eval"),
                "changes training images, which augment.train_like_eval makes as evaluation's",
            )
    if recipe.data.preprocess.channels == 1:
        for name in ("saturation", "hue"):
            if getattr(augment.color_jitter, name) > 0:
                yield Contradiction(
                    (f"augment.color_jitter.{name}", "data.preprocess.channels"),
                    "needs colours, but data.preprocess.channels is 1",
                )
    yield from _mixing(recipe)


def _mixing(recipe: Recipe) -> Iterator[Contradiction]:
    augment, cutmix, batch = recipe.augment, recipe.augment.cutmix, recipe.batch
    if cutmix.mode == "beta" and cutmix.lam < 1:
        yield Contradiction(
            ("augment.cutmix.lam", "augment.cutmix.mode"), "is for the kinds fixed and random; beta has alpha"
        )
    if cutmix.mode != "beta" and cutmix.alpha > 0:
        yield Contradiction(
            ("augment.cutmix.alpha", "augment.cutmix.mode"), f"is for the kind beta; {cutmix.mode} has keep"
        )
    if augment.combine == "both" and not (augment.mixup.on and cutmix.on):
        yield Contradiction(
            ("augment.combine", "augment.mixup.alpha", "augment.cutmix.alpha", "augment.cutmix.lam"),
            "both needs augment.mixup and augment.cutmix on",
        )
    if not augment.mixes:
        return
    fields = ("augment.mixup.alpha",) if augment.mixup.on else ("augment.cutmix.alpha", "augment.cutmix.lam")
    group = batch.group if isinstance(batch.group, int) else batch.size
    if group == 1:
        yield Contradiction((*fields, "batch.group", "batch.size"), "has no partner in a group of one sample")
    elif cutmix.on and cutmix.roll >= group:
        yield Contradiction(
            ("augment.cutmix.roll", "batch.group", "batch.size"),
            f"{cutmix.roll} samples before is no other sample of a group of {group}",
        )


def _batch(recipe: Recipe) -> Iterator[Contradiction]:
    batch = recipe.batch
    if isinstance(batch.group, int) and batch.group > batch.size:
        yield Contradiction(
            ("batch.group", "batch.size"),
            f"{batch.group} is more than the global batch: batch.size is {batch.size} (for one group write all)",
        )


def _schedule(recipe: Recipe) -> Iterator[Contradiction]:
    schedule, length = recipe.schedule, recipe.length
    yield from _unused_schedule(recipe)
    if schedule.name == "step" and schedule.period is None:
        yield Contradiction(("schedule.name", "schedule.period"), "step needs schedule.period, as in 30ep")
    if schedule.name == "multistep" and not schedule.milestones:
        yield Contradiction(
            ("schedule.name", "schedule.milestones"), "multistep needs schedule.milestones, as in [30ep, 60ep]"
        )
    if schedule.name == "piecewise":
        yield from _table(recipe)
    if schedule.name == "one-cycle" and schedule.warmup.value == 0:
        yield Contradiction(("schedule.name", "schedule.warmup"), "one-cycle needs schedule.warmup, as in 30%")
    if schedule.name == "exponential" and schedule.num_periods is not None and schedule.period is not None:
        yield Contradiction(
            ("schedule.num_periods", "schedule.period"), "sets the period, but schedule.period is given too"
        )
    if schedule.end_lr_ratio is not None and schedule.end_lr > 0:
        yield Contradiction(
            ("schedule.end_lr_ratio", "schedule.end_lr"), "and schedule.end_lr say the same thing twice"
        )
    pairs = zip(schedule.milestones, schedule.milestones[1:], strict=False)
    for before, after in pairs:
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("schedule.milestones",), f"must rise, but {after} follows {before}")
    if schedule.warmup.unit == length.unit and schedule.warmup.value > length.value:
        yield Contradiction(
            ("schedule.warmup", "length"), f"{schedule.warmup} is longer than the whole run: length is {length}"
        )


def _unused_schedule(recipe: Recipe) -> Iterator[Contradiction]:
    """What the kind of schedule does not look at, when it is not at its default."""
    schedule = recipe.schedule
    blank = type(schedule)()
    for name in type(schedule).model_fields:
        if name not in SCHEDULE_FIELDS[schedule.name] and getattr(schedule, name) != getattr(blank, name):
            kinds = [kind for kind, used in SCHEDULE_FIELDS.items() if name in used]
            yield Contradiction(
                (f"schedule.{name}", "schedule.name"),
                f"is for the {'kind' if len(kinds) == 1 else 'kinds'} {_and(kinds)}, but schedule.name is "
                f"{schedule.name}",
            )


def _and(words: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1])))


def _optimizer(recipe: Recipe) -> Iterator[Contradiction]:
    optimizer = recipe.optimizer
    if optimizer.nesterov and optimizer.momentum == 0:
        yield Contradiction(("optimizer.nesterov", "optimizer.momentum"), "needs optimizer.momentum above 0")
    is_rmsprop = optimizer.name.startswith("rmsprop")
    given = {
        "nesterov": (optimizer.nesterov, not is_rmsprop, "sgd and lars"),
        "alpha": (optimizer.alpha != 0.9, is_rmsprop, "rmsprop"),
        "alpha_exponent": (optimizer.alpha_exponent is not None, is_rmsprop, "rmsprop"),
        "eps": (optimizer.eps != "auto", optimizer.name != "sgd", "rmsprop and lars"),
        "trust_coefficient": (optimizer.trust_coefficient != 0.001, optimizer.name == "lars", "lars"),
        "lars_exclude": (optimizer.lars_exclude != "norm-bias", optimizer.name == "lars", "lars"),
        "implementation": (optimizer.implementation == "fused", not is_rmsprop, "sgd and lars when fused"),
        "norm_bias_lr_scale": (optimizer.norm_bias_lr_scale != 1, optimizer.name == "sgd", "sgd"),
    }
    for name, (is_given, is_used, kinds) in given.items():
        if is_given and not is_used:
            yield Contradiction(
                (f"optimizer.{name}", "optimizer.name"), f"is for {kinds}, but optimizer.name is {optimizer.name}"
            )
    if optimizer.alpha_exponent is not None and optimizer.alpha != 0.9:
        yield Contradiction(("optimizer.alpha_exponent", "optimizer.alpha"), "and optimizer.alpha both give the decay")
    if optimizer.name == "lars" and optimizer.weight_decay_exclude not in ("none", optimizer.lars_exclude):
        yield Contradiction(
            ("optimizer.weight_decay_exclude", "optimizer.lars_exclude"),
            f"{optimizer.weight_decay_exclude} is not what lars does: it decays all but "
            f"optimizer.lars_exclude ({optimizer.lars_exclude}); leave optimizer.weight_decay_exclude out",
        )


def _ending(recipe: Recipe) -> Iterator[Contradiction]:
    checkpoint_average, save_every = recipe.checkpoint_average, recipe.save.every
    if isinstance(checkpoint_average.last, Duration):
        if checkpoint_average.last.unit == "min":
            yield Contradiction(("checkpoint_average.last",), f"cannot be in minutes ({checkpoint_average.last})")
        if checkpoint_average.last.value == 0:
            yield Contradiction(
                ("checkpoint_average.last",), f"must be longer than {checkpoint_average.last}; to switch it off: off"
            )
        if save_every == "off":
            yield Contradiction(
                ("checkpoint_average.last", "save.every"), "averages checkpoints, but save.every: off writes none"
            )
        elif isinstance(save_every, Duration) and save_every.unit == "min":
            yield Contradiction(
                ("checkpoint_average.last", "save.every"),
                f"must not depend on the clock, but save.every is {save_every}",
            )
    for name, value in (("target", recipe.early_stopping.target), ("patience", recipe.early_stopping.patience)):
        if value != "off" and recipe.evaluate.every == "off":
            yield Contradiction(
                (f"early_stopping.{name}", "evaluate.every"),
                "is judged by evaluations, but evaluate.every: off makes none",
            )


def _table(recipe: Recipe) -> Iterator[Contradiction]:
    """A value for each milestone; order is checked for all milestones alike."""
    num_values, num_milestones = len(recipe.schedule.milestone_lrs), len(recipe.schedule.milestones)
    if num_values == 0:
        text = "piecewise needs schedule.milestone_lrs, one for each milestone; schedule.lr holds before the first"
        yield Contradiction(("schedule.name", "schedule.milestone_lrs"), text)
    elif num_values != num_milestones:
        text = f"has {num_values}, but schedule.milestones {num_milestones}: each value begins at its milestone"
        yield Contradiction(("schedule.milestone_lrs", "schedule.milestones"), text)
    schedule = recipe.schedule
    if not schedule.uses_lr and schedule.lr not in (type(schedule)().lr, *schedule.milestone_lrs[:1]):
        yield Contradiction(
            ("schedule.lr", "schedule.milestone_lrs", "schedule.milestones"),
            f"{schedule.lr:g} has no effect: the schedule begins at {schedule.milestones[0]}; "
            "its rates are schedule.milestone_lrs",
        )


def _rest(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.engine.fused_kernels == "on" and recipe.engine.compile == "on":
        yield Contradiction(("engine.fused_kernels", "engine.compile"), "both would compute the network")
    if recipe.engine.fused_kernels == "on" and not recipe.precision.is_plain:
        text = "leave each operation's type alone, but precision decides it for single operations"
        yield Contradiction(("engine.fused_kernels", "precision.mode"), text)
    if recipe.engine.cudnn_benchmark == "on" and recipe.engine.deterministic:
        text = "may choose another algorithm in each run, but engine.deterministic promises the same bits"
        yield Contradiction(("engine.cudnn_benchmark", "engine.deterministic"), text)
    if recipe.profile != "off" and recipe.profile[0] > recipe.profile[1]:
        yield Contradiction(("profile",), f"ends at step {recipe.profile[1]}, before it begins ({recipe.profile[0]})")
    if len(set(recipe.loggers)) < len(recipe.loggers):
        yield Contradiction(("loggers",), f"names one twice: {', '.join(recipe.loggers)}")
    yield from _precision(recipe)
    yield from _figures(recipe)


def _precision(recipe: Recipe) -> Iterator[Contradiction]:
    precision = recipe.precision
    given = {
        "loss_scale": (precision.loss_scale != "dynamic", precision.is_scaled, "fp16, 16.16 and 16.32"),
        "rounding": (precision.rounding != "auto", precision.mode == "16.16", "16.16, whose weights are halves"),
        "ops": (
            precision.ops.float32 or precision.ops.low_precision,
            precision.has_lower,
            "modes with a type below fp32",
        ),
        "reduced_precision_reduction": (
            precision.reduced_precision_reduction == "on",
            precision.has_lower,
            "modes with a type below fp32",
        ),
    }
    for name, (is_given, is_used, modes) in given.items():
        if is_given and not is_used:
            yield Contradiction(
                (f"precision.{name}", "precision.mode"), f"is for {modes}, but precision.mode is {precision.mode}"
            )
    for name in sorted(set(precision.ops.float32) & set(precision.ops.low_precision)):
        yield Contradiction(
            ("precision.ops.float32", "precision.ops.low_precision"),
            f"and precision.ops.low_precision both name {name}",
        )
    for name in sorted(set(precision.ops.low_precision) & {"cross_entropy", "nll_loss"}):
        yield Contradiction(("precision.ops.low_precision",), f"cannot have {name}: the loss is computed in float32")


def _figures(recipe: Recipe) -> Iterator[Contradiction]:
    """Accuracies are fractions wherever they are promised, cited or measured."""
    named = [
        ("expect.value", recipe.expect),
        *(("published", claim) for claim in recipe.published),
        *(("measured", found) for found in recipe.measured),
    ]
    known = _METRICS[recipe.task]
    if recipe.expect is not None and recipe.expect.metric not in known:
        text = f"{recipe.expect.metric} is not reported by {recipe.task}, which has {_and(known)}"
        yield Contradiction(("expect.metric", "task"), text)
    for field, figure in named:
        if figure is None:
            continue
        if (
            figure.metric in known
            and figure.metric != "loss"
            and figure.value is not None
            and not 0 <= figure.value <= 1
        ):
            text = f"is a fraction between 0 and 1; for {figure.value} percent write {figure.value / 100:g}"
            yield Contradiction((field,), text if field == "expect.value" else f"the value {text}")
