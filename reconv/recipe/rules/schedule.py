"""Rules of durations, the batch, the learning-rate schedule and the optimizer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.rules.contradiction import Contradiction, join_words
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


def schedule_rules(recipe: Recipe) -> Iterator[Contradiction]:
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
            text = f"is for {join_words(users)}, but schedule.name is {schedule.name}"
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


def optimizer_rules(recipe: Recipe) -> Iterator[Contradiction]:
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
