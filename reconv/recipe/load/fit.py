"""Let the values that a user did not write follow those that they did, by the rules of `adapt`."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

from pydantic import ValidationError

from reconv.recipe.load.adapt import (
    Change,
    follow_batch,
    follow_length,
    follow_precision,
    literal_rate,
    precision_note,
    rate_note,
)
from reconv.recipe.load.draft import OVERRIDES, Draft, Origin
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.precision import PrecisionConfig
from reconv.recipe.parts.schedule import SCHEDULES, ScheduleConfig
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration

_FITTED = Origin(OVERRIDES - 2, 0, "fitted")  # values that follow what the user wrote


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
