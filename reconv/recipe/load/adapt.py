"""Fit a preset to another length, batch, network or dataset: what the user did not write follows by fixed rules.

- Length: durations in the unit of the preset's length (epochs, in most presets) keep their share of the run. Percent
  stay. Durations in another unit stay, and a warm-up longer than the run is shortened to it.
- Batch: a group of a fixed size is never larger than the batch, and `--batch-per-device` carries it. The peak learning
  rate is linear in the batch size if the recipe says for which batch size it is, else it stays.
- Network: options that the new network does not have are dropped, and so is an image size made for the old one.
- Precision: what the new mode does not have (a loss scale, a rounding of weights, dtypes of operations) is dropped.
- Data: a batch larger than the training set becomes the largest power of two with eight steps per epoch.

Values that a user wrote, in a file or as an option, never change: if they contradict each other, that is an error.
The intervals of evaluation, saving and logging stay. What was changed is part of the recipe that a run stores.

The rules are functions of recipe and data. A resumed run keeps its own durations if the command gives none
(tests/recipe/test_adapt.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from fractions import Fraction
from typing import Any

from pydantic import ValidationError

from reconv.core.message import message
from reconv.recipe.load.draft import OVERRIDES, Draft, Origin
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.precision import PrecisionConfig
from reconv.recipe.parts.schedule import SCHEDULES, ScheduleConfig
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration, parse_rate

MIN_STEPS_PER_EPOCH = 8  # of a batch that is chosen for a small dataset
# Fields that follow the length: points or parts of the run, as opposed to intervals of evaluation or saving.
LENGTH_FIELDS = (
    *("schedule.warmup", "schedule.decay_until", "schedule.period", "schedule.milestones"),
    *("model.freeze_until", "augment.progressive_resizing", "checkpoint_average.last"),
)
CHANGED = "changed: "  # a description that lists what was changed
_DIGITS = 4  # significant digits of a scaled duration
_DTYPES = {  # of weights and products, by precision mode
    "fp64": "everything in float64",
    "fp32": "weights and products in float32",
    "tf32": "weights in float32, products in TF32",
    "32.32": "weights and products in float32",
    "bf16": "weights in float32, products in bfloat16",
    "fp16": "weights in float32, products in float16",
    "bf16-all": "weights in float32, activations in bfloat16",
    "16.32": "weights in float32, activations in float16",
    "16.16": "weights and activations in float16",
}
_NUM_CLASSES = {"ImageNet": 1000, "COCO": 80, "VOC": 20}  # of datasets that presets make claims about
_FITTED = Origin(OVERRIDES - 2, 0, "fitted")  # values that follow what the user wrote


@message
@dataclass(frozen=True, slots=True)
class Change:
    """A field that follows another one, or a number of the plan that does."""

    field: str
    old: object
    new: object
    why: str
    is_field: bool = True

    def __str__(self) -> str:
        return f"{self.field} {show(self.old)} -> {show(self.new)} ({self.why})"


def show(value: object) -> str:
    """A value as in YAML."""
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(show, value))}]"
    if isinstance(value, bool):
        return str(value).lower()
    if value is None:
        return "null"
    return f"{value:g}" if isinstance(value, float) else str(value)


def length_fields(schedule: str, explicit: Collection[str]) -> list[str]:
    """The fields that follow the length in a recipe with this schedule, unless the user wrote them."""
    unused = {f"schedule.{name}" for name in ScheduleConfig.model_fields if name not in SCHEDULES[schedule].fields}
    return [field for field in LENGTH_FIELDS if field not in unused and field not in explicit]


def follow_length(
    preset: Recipe, length: Duration, schedule: str, explicit: Collection[str], steps_per_epoch: int | None = None
) -> Iterator[Change]:
    """The durations of a preset for another length; if the units of the two differ, `steps_per_epoch` is needed.

    `schedule` is the name of the schedule, which may be another than the preset's.
    """
    factor = _length_factor(preset.length, length, steps_per_epoch)
    if factor is None or factor == 1:
        return
    fields = length_fields(schedule, explicit)
    for field, old in _durations(preset):
        new = _scaled(old, preset.length.unit, factor)
        if field in fields and new != old:
            yield Change(field, old, new, f"keeps its share of the run, {preset.length} -> {length}")


def _durations(recipe: Recipe) -> Iterator[tuple[str, Any]]:
    """The fields that follow the length, with their values."""
    schedule = recipe.schedule
    by_epoch = schedule.name == "exponential" and schedule.period is None and schedule.num_periods is None
    for field in LENGTH_FIELDS:
        section, _, name = field.partition(".")
        is_default = field == "schedule.period" and by_epoch
        yield field, Duration(1, "ep") if is_default else getattr(getattr(recipe, section), name)


def _length_factor(old: Duration, new: Duration, steps_per_epoch: int | None) -> Fraction | None:
    """New length / old length; None if it is not known."""
    if {old.unit, new.unit} - {"ep", "step"} or old.value == 0 or new.value == 0:
        return None
    if old.unit == new.unit:
        return new.exact / old.exact
    if steps_per_epoch is None:
        return None
    steps = [duration.exact * (steps_per_epoch if duration.unit == "ep" else 1) for duration in (old, new)]
    return steps[1] / steps[0]


def _scaled(value: Any, unit: str, factor: Fraction) -> Any:
    """A duration or a list of points with the durations in `unit` scaled; points stay in order."""
    if isinstance(value, Duration) and value.unit == unit and value.value > 0:
        scaled = value.exact * factor
        whole = float(max(1, math.floor(scaled + Fraction(1, 2))))
        return Duration(whole if unit == "step" else _rounded(scaled), unit)
    if not isinstance(value, tuple):
        return value
    points: list[Any] = []
    for item in value:  # a milestone, or (start, size)
        start, *rest = item if isinstance(item, tuple) else (item,)
        point = _scaled(start, unit, factor)
        before = points[-1] if points else None
        before = before[0] if isinstance(before, tuple) else before
        if before is not None and before.unit == point.unit == "step" and point.value <= before.value:
            point = Duration(before.value + 1, "step")
        points.append((point, *rest) if rest else point)
    return tuple(points)


def _rounded(number: Fraction) -> float:
    """A number with few digits, so that a recipe stays readable."""
    value = Decimal(number.numerator) / Decimal(number.denominator)
    return float(round(value, _DIGITS - 1 - value.adjusted()))


def follow_batch(
    preset: Recipe, size: int, explicit: Collection[str], per_device: int | None = None
) -> Iterator[Change]:
    """The group size of a preset, and what becomes of its learning rate, for another global batch size."""
    group = preset.batch.group
    if isinstance(group, int) and "batch.group" not in explicit:
        if per_device is not None and per_device % group:
            yield Change("batch.group", group, per_device, "follows --batch-per-device")
        elif group > size:
            yield Change("batch.group", group, size, "cannot be larger than the batch")
    schedule, base = preset.schedule, preset.schedule.base_batch_size
    if size == preset.batch.size or base is None or {"schedule.lr", "schedule.base_batch_size"} & set(explicit):
        return
    old, new = (schedule.lr * batch / base for batch in (preset.batch.size, size))
    yield Change(
        "peak learning rate", old, new, f"{schedule.lr:g} per {base}, linear in the batch size", is_field=False
    )
    if schedule.end_lr > new and "schedule.end_lr" not in explicit:
        end = schedule.end_lr * new / old
        yield Change("schedule.end_lr", schedule.end_lr, end, "keeps its ratio to the peak learning rate")


def rate_note(preset: Recipe, size: int, explicit: Collection[str]) -> str | None:
    """A line about a learning rate that stays although the batch size changes."""
    schedule = preset.schedule
    if size == preset.batch.size or schedule.base_batch_size is not None or "schedule.lr" in explicit:
        return None
    if not schedule.uses_lr:
        return None
    linear = schedule.lr * size / preset.batch.size
    return (
        f"schedule.lr stays {schedule.lr:g} at a batch of {size} (was {preset.batch.size}), since the recipe does not "
        f"scale it; in proportion it would be --lr {linear:.4g}"
    )


def literal_rate(name: str, rate: object, written: str, size: int, base: int) -> Iterator[Change]:
    """An inherited lr (or milestone_lrs) at this batch size, since `written` is used as it is."""
    rates = [_number(item) for item in (rate if isinstance(rate, (list, tuple)) else [rate])]
    if rate is None or None in rates:
        return
    scaled = [number * size / base for number in rates if number is not None]
    new = scaled if isinstance(rate, (list, tuple)) else scaled[0]
    if scaled != rates:
        yield Change(f"schedule.{name}", rate, new, f"x {size}/{base}, since schedule.{written} is used as written")


def _number(rate: object) -> float | None:
    """A learning rate as in a recipe's text; None: it is none."""
    if isinstance(rate, str):
        parsed = parse_rate(rate)
        return None if parsed is None else parsed[0]
    return rate if isinstance(rate, (int, float)) else None


def follow_model(
    preset: Recipe, name: str, has_option: Collection[str] | None, explicit: Collection[str]
) -> Iterator[Change]:
    """Drop what a preset wrote for its own network if another one is chosen; `has_option` are the options of the new
    one.

    None stands for a network of another package, whose options are not known: it gets none of the preset's.
    """
    if name == preset.model.name:
        return
    for option, value in preset.model.options.items():
        field = f"model.options.{option}"
        if field not in explicit and value is not None and (has_option is None or option not in has_option):
            yield Change(field, value, None, f"{name} has no such option")
    default, size = type(preset.data.preprocess)(), preset.data.preprocess.size
    # A preset that names its dataset has the image size of the data, and a detector's anchors depend on it.
    if preset.task != "classification" or preset.data.source != "auto" or size == default.size:
        return
    if "data.preprocess.size" not in explicit:
        yield Change("data.preprocess.size", size, default.size, f"{size} px are for {preset.model.name}")
        if preset.augment.size is not None and "augment.size" not in explicit:
            yield Change("augment.size", preset.augment.size, None, "follows data.preprocess.size")
        if isinstance(preset.data.preprocess.resize, int) and "data.preprocess.resize" not in explicit:
            yield Change(
                "data.preprocess.resize", preset.data.preprocess.resize, default.resize, "follows data.preprocess.size"
            )


def follow_precision(preset: Recipe, precision: PrecisionConfig, explicit: Collection[str]) -> Iterator[Change]:
    """Drop what a preset wrote for its own precision mode if another mode is chosen that does not have it."""
    old, mode = preset.precision, precision.mode
    needs_full = "is for modes with a dtype below fp32"
    for field, value, default, is_used, why in (
        ("precision.loss_scale", old.loss_scale, "dynamic", precision.uses_loss_scale, f"{mode} has no loss scale"),
        ("precision.rounding", old.rounding, "auto", mode == "16.16", "is for 16.16, with half-precision weights"),
        ("precision.ops.float32", old.ops.float32, (), precision.has_low_precision, needs_full),
        ("precision.ops.low_precision", old.ops.low_precision, (), precision.has_low_precision, needs_full),
        (
            "precision.reduced_precision_reduction",
            "auto" if old.reduced_precision_reduction != "on" else "on",
            "auto",
            precision.has_low_precision,
            needs_full,
        ),
        (
            "engine.fused_kernels",
            "auto" if preset.engine.fused_kernels != "on" else "on",
            "auto",
            precision.follows_autocast,
            f"{mode} casts operations itself",
        ),
        ("memory.shard_optimizer", preset.memory.shard_optimizer, False, mode != "16.16", "16.16 cannot be sharded"),
    ):
        if value != default and not is_used and field not in explicit:
            yield Change(field, value, default, why)


def precision_note(preset: Recipe, precision: PrecisionConfig) -> str | None:
    """A line about the dtypes of another mode than the preset's."""
    if precision.mode == preset.precision.mode:
        return None
    scale = f"; loss scale {show(precision.loss_scale)}" if precision.uses_loss_scale else ""
    statistics = "float64" if precision.mode == "fp64" else "float32"
    return (
        f"precision.mode {preset.precision.mode} -> {precision.mode}: {_DTYPES[precision.mode]}; "
        f"batch norm statistics, losses and sums of gradients in {statistics}{scale}"
    )


def follow_data(recipe: Recipe, num_train: int, explicit: Collection[str]) -> Iterator[Change]:
    """A smaller batch, with its group, for a dataset that does not fill one."""
    size = recipe.batch.size
    if not recipe.data.drop_last or not 0 < num_train < size or "batch.size" in explicit:
        return
    if recipe.data.epoch_samples is not None:
        return
    per_step = max(1, num_train // MIN_STEPS_PER_EPOCH)
    new = max(1 << (per_step.bit_length() - 1), min(2, num_train))
    yield Change("batch.size", size, new, f"the dataset has {num_train:,} training samples")
    yield from follow_batch(recipe, new, explicit)


def shorten_warmup(recipe: Recipe, warmup_steps: int, total_steps: int, explicit: Collection[str]) -> Iterator[Change]:
    """A warm-up that is longer than the run and was not written by the user."""
    if warmup_steps > total_steps and "schedule.warmup" not in explicit:
        new = Duration(float(total_steps), "step")
        yield Change("schedule.warmup", recipe.schedule.warmup, new, f"the run has {total_steps:,} steps")


def is_about_other_data(recipe: Recipe, num_classes: int) -> bool:
    """True if the description or the expected result are about a dataset with another number of classes."""
    texts = [recipe.description, recipe.expect.on if recipe.expect else ""]
    known = [number for name, number in _NUM_CLASSES.items() if any(text.startswith(name) for text in texts)]
    return any(num_classes not in (number, number + 1) for number in known)


def describe(changed: Sequence[str]) -> str:
    """The description of a recipe that was changed by options or by its data."""
    shown, more = changed[:6], len(changed) - 6
    return f"{CHANGED}{', '.join(shown)}" + (f" and {more} more" if more > 0 else "")


def use_written_rates(draft: Draft, explicit: frozenset[str]) -> list[Change]:
    """Use rates as the user wrote them: a base_batch_size from further down the `extends` chain does not scale them."""
    changes: list[Change] = []
    base, size = draft.value(("schedule", "base_batch_size")), draft.value(("batch", "size"), BatchConfig().size)
    names = [
        name for name in ("lr", "milestone_lrs") if draft.is_nearer(f"schedule.{name}", "schedule.base_batch_size")
    ]
    written = [name for name in names if f"schedule.{name}" in explicit]
    if written and isinstance(base, int) and isinstance(size, int):
        for name in {"lr", "milestone_lrs"} - set(written):
            changes += literal_rate(name, draft.value(("schedule", name)), written[0], size, base)
        origin = draft.origins["schedule", written[0]]
        draft.put(("schedule", "base_batch_size"), None, origin)
        draft.drop_claims({f"schedule.{name}": draft.value(("schedule", name)) for name in written}, origin)
        _apply(draft, changes)
    section = draft.value(("schedule",))
    if isinstance(section, dict) and section.get("name") == "piecewise" and "schedule.lr" not in explicit:
        with suppress(ValidationError):
            schedule = ScheduleConfig.model_validate(section)
            if not schedule.uses_lr and schedule.milestone_lrs:  # no step uses the inherited lr
                draft.put(("schedule", "lr"), schedule.milestone_lrs[0], _FITTED)
    return changes


def fit_to_changes(draft: Draft, preset: Recipe, explicit: frozenset[str]) -> tuple[list[Change], list[str]]:
    """Let what is not explicit follow length, batch size and precision; returns the changes and notes about them."""
    changes: list[Change] = []
    notes: list[str] = []
    schedule = draft.value(("schedule", "name"), preset.schedule.name)
    used = SCHEDULES[schedule].fields if isinstance(schedule, str) and schedule in SCHEDULES else ()
    with suppress(ValueError):  # an invalid length, which validation will report
        length = Duration.parse(draft.value(("length",), preset.length))
        if used:
            changes += follow_length(preset, length, schedule, explicit)
    size = draft.value(("batch", "size"), preset.batch.size)
    if isinstance(size, int) and size > 0:
        changes += follow_batch(preset, size, explicit, draft.per_device)
        note = rate_note(preset, size, explicit)
        notes += [note] if note else []
    precision = _precision(draft, preset, explicit)
    if precision is not None:
        changes += follow_precision(preset, precision, explicit)
        note = precision_note(preset, precision)
        notes += [note] if note else []
    if "end_lr" not in used:
        changes = [change for change in changes if change.field != "schedule.end_lr"]
    _apply(draft, changes)
    return changes, notes


def _precision(draft: Draft, preset: Recipe, explicit: frozenset[str]) -> PrecisionConfig | None:
    """The precision section with the mode that the user wrote; None where they wrote none, or no mode."""
    if "precision.mode" not in explicit:
        return None
    written = {"mode": draft.value(("precision", "mode"))}
    if "precision.loss_scale" in explicit:
        written["loss_scale"] = draft.value(("precision", "loss_scale"))
    try:
        chosen = PrecisionConfig.model_validate(written)
    except ValidationError:  # reported later
        return None
    if chosen.uses_loss_scale and "precision.loss_scale" not in explicit:
        return chosen.model_copy(update={"loss_scale": preset.precision.loss_scale})
    return chosen


def _apply(draft: Draft, changes: Sequence[Change]) -> None:
    for change in changes:
        if change.is_field:
            draft.put(tuple(change.field.split(".")), change.new, _FITTED)
