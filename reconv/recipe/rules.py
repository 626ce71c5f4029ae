"""What the fields of a recipe say about each other: every contradiction that can be seen without data.

Owns the rules between fields. Refuses to know types and ranges (schema), files (load) and derived numbers (plan).
Invariant: all contradictions of a recipe are found at once, each with the fields it is about.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconv.recipe.units import Duration

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Two or more fields (or one field and common sense) that cannot both be meant."""

    fields: tuple[str, ...]  # dotted; the first is named in the message
    text: str


class ContradictionError(ValueError):
    """All contradictions of one recipe."""

    def __init__(self, found: Sequence[Contradiction]) -> None:
        super().__init__("; ".join(f"{c.fields[0]}: {c.text}" for c in found))
        self.found = tuple(found)


def contradictions(recipe: Recipe) -> list[Contradiction]:
    """Every contradiction between the recipe's fields."""
    return [c for rule in (_durations, _model, _data, _augment, _batch, _schedule, _rest) for c in rule(recipe)]


def _durations(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.length.unit not in ("ep", "step"):
        yield Contradiction(("length",), f"is in ep or step, not {recipe.length}")
    intervals = {
        "evaluate.every": recipe.evaluate.every,
        "save.every": recipe.save.every,
        "log.every": recipe.log.every,
    }
    lengths = {"length": recipe.length, "schedule.period": recipe.schedule.period, **intervals}
    for field, duration in lengths.items():
        if isinstance(duration, Duration) and duration.value == 0:
            instead = "; to switch it off: off" if field in ("evaluate.every", "save.every") else ""
            yield Contradiction((field,), f"must be longer than {duration}{instead}")
    clockless: list[tuple[str, Duration | str | None]] = [
        ("schedule.warmup", recipe.schedule.warmup),
        ("schedule.period", recipe.schedule.period),
        ("evaluate.every", recipe.evaluate.every),
        ("evaluate.offset", recipe.evaluate.offset),
        ("log.every", recipe.log.every),
        *(("schedule.milestones", milestone) for milestone in recipe.schedule.milestones),
        *(("save.pin", pin) for pin in recipe.save.pin),
    ]
    for field, typed in clockless:
        if isinstance(typed, Duration) and typed.unit == "min":
            yield Contradiction((field,), f"cannot be in minutes ({typed}): it must not depend on the clock")
    if recipe.save.every == "off" and recipe.save.pin:
        yield Contradiction(("save.pin", "save.every"), "has checkpoints to keep, but save.every: off writes none")


def _model(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.model.freeze and recipe.model.init is None:
        yield Contradiction(("model.freeze", "model.init"), "would train a head on random weights; it needs model.init")


def _data(recipe: Recipe) -> Iterator[Contradiction]:
    data, preprocess = recipe.data, recipe.data.preprocess
    for name, values in (("mean", preprocess.mean), ("std", preprocess.std)):
        if len(values) != preprocess.channels:
            yield Contradiction(
                (f"data.preprocess.{name}", "data.preprocess.channels"),
                f"has {len(values)} {'value' if len(values) == 1 else 'values'}, "
                f"but data.preprocess.channels is {preprocess.channels}",
            )
    if preprocess.resize is not None and preprocess.resize < preprocess.size:
        yield Contradiction(
            ("data.preprocess.resize", "data.preprocess.size"),
            f"{preprocess.resize} leaves no room for a crop of data.preprocess.size {preprocess.size}",
        )
    if not data.source.startswith("synthetic"):
        for name, number in (("num_samples", data.num_samples), ("num_classes", data.num_classes)):
            if number is not None:
                yield Contradiction(
                    (f"data.{name}", "data.source"), f"is for synthetic data, but data.source is {data.source}"
                )


def _augment(recipe: Recipe) -> Iterator[Contradiction]:
    for name, (low, high) in (("area", recipe.augment.area), ("ratio", recipe.augment.ratio)):
        if low > high:
            yield Contradiction((f"augment.{name}",), f"goes from the smaller to the larger, not {low} to {high}")


def _batch(recipe: Recipe) -> Iterator[Contradiction]:
    batch = recipe.batch
    if isinstance(batch.group, int) and batch.group > batch.size:
        yield Contradiction(
            ("batch.group", "batch.size"),
            f"{batch.group} is more than the global batch: batch.size is {batch.size} (for one group write all)",
        )
    mixing = [name for name in ("mixup", "cutmix") if getattr(recipe.augment, name).alpha > 0]
    if mixing and (batch.group == 1 or batch.size == 1):
        yield Contradiction(
            (f"augment.{mixing[0]}.alpha", "batch.group", "batch.size"), "has no partner in a group of one sample"
        )


def _schedule(recipe: Recipe) -> Iterator[Contradiction]:
    schedule, length = recipe.schedule, recipe.length
    if schedule.kind == "step" and schedule.period is None:
        yield Contradiction(("schedule.kind", "schedule.period"), "step needs schedule.period, as in 30ep")
    if schedule.kind == "milestones" and not schedule.milestones:
        yield Contradiction(
            ("schedule.kind", "schedule.milestones"), "milestones needs schedule.milestones, as in [30ep, 60ep]"
        )
    pairs = zip(schedule.milestones, schedule.milestones[1:], strict=False)
    for before, after in pairs:
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("schedule.milestones",), f"must rise, but {after} follows {before}")
    if schedule.warmup.unit == length.unit and schedule.warmup.value > length.value:
        yield Contradiction(
            ("schedule.warmup", "length"), f"{schedule.warmup} is longer than the whole run: length is {length}"
        )


def _rest(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.optimizer.nesterov and recipe.optimizer.momentum == 0:
        yield Contradiction(("optimizer.nesterov", "optimizer.momentum"), "needs optimizer.momentum above 0")
    if recipe.precision.loss_scale != "dynamic" and recipe.precision.mode != "fp16":
        yield Contradiction(
            ("precision.loss_scale", "precision.mode"), f"is for fp16, but precision.mode is {recipe.precision.mode}"
        )
    expect = recipe.expect
    if expect is not None and expect.metric in ("top1", "top5") and not 0 <= expect.value <= 1:
        yield Contradiction(
            ("expect.value",), f"is a fraction between 0 and 1; for {expect.value} percent write {expect.value / 100:g}"
        )
