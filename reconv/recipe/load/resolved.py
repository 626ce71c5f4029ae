"""A recipe with the origin of its values, the preset it was made from, and what was changed to fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from reconv.core.errors import RecipeError, one_of
from reconv.core.message import message
from reconv.core.text import printable_lines
from reconv.recipe.load.adapt import (
    CHANGED,
    Change,
    describe,
    follow_data,
    follow_length,
    follow_model,
    is_about_other_data,
    length_fields,
    rate_note,
    shorten_warmup,
    show,
)
from reconv.recipe.parts.contradiction import ContradictionError
from reconv.recipe.plan import length_steps, steps_per_epoch
from reconv.recipe.schema import Recipe, is_derived
from reconv.recipe.units import duration_steps


@message
@dataclass(frozen=True, slots=True)
class Resolved:
    """A recipe, the origin of each of its values, and its file."""

    recipe: Recipe
    origins: Mapping[str, str]  # dotted leaf -> "default", "quickstart.yaml:12", "--batch-size", ...
    file: Path | None
    header: str  # the file's leading comment
    preset: Recipe | None = None  # the one that the user's files and options change
    explicit: frozenset[str] = frozenset()  # fields that the user wrote
    changes: tuple[Change, ...] = ()  # what follows from what the user wrote, and from the data
    notes: tuple[str, ...] = ()  # further lines for the plan
    fixed: frozenset[str] = frozenset()  # fields that are not derived: those set where `derive` is, or nearer

    def is_open(self, field: str) -> bool:
        """True if a field is to be derived from the data."""
        return is_derived(field, self.recipe.derive) and field not in self.fixed

    @property
    def lines(self) -> tuple[str, ...]:
        """Lines on what was changed to fit, for the plan."""
        return (*(f"changed to fit: {change}" for change in self.changes), *self.notes)

    def with_changes(self, changes: Sequence[Change], notes: Sequence[str] = ()) -> Resolved:
        """The recipe with these changes; it no longer claims what held before them."""
        fields = [change for change in changes if change.is_field]
        claims = self._claims([f"{change.field} {show(change.new)}" for change in fields]) if fields else {}
        return replace(
            self,
            recipe=_with_values(self.recipe, {**claims, **{change.field: change.new for change in fields}}),
            origins={**self.origins, **{change.field: "fitted" for change in fields}},
            changes=(*self.changes, *changes),
            notes=(*self.notes, *notes),
        )

    def with_durations_of(self, run: Recipe) -> Resolved:
        """The recipe with a run's own durations where the user wrote none, so that a resumed run keeps its schedule."""
        length = self.recipe.length
        if length.unit != run.length.unit or length.value < run.length.value:
            return self
        fields = length_fields(self.recipe.schedule.name, self.explicit)
        theirs = {field: getattr(getattr(run, field.partition(".")[0]), field.partition(".")[2]) for field in fields}
        kept = tuple(change for change in self.changes if change.field not in theirs)
        return replace(self, recipe=_with_values(self.recipe, theirs), changes=kept)

    def without_claims(self, why: str) -> Resolved:
        """The recipe without a description and an expected result that do not hold."""
        return replace(self, recipe=_with_values(self.recipe, self._claims([why])))

    def _claims(self, changed: Sequence[str]) -> dict[str, Any]:
        """Description and expected result of this recipe after changes; those that the user wrote stay."""
        claims: dict[str, Any] = {}
        if not any(field.partition(".")[0] == "expect" for field in self.explicit):
            claims["expect"] = None
        if "description" not in self.explicit:
            before = self.recipe.description
            written = [before.removeprefix(CHANGED)] if before.startswith(CHANGED) else []
            claims["description"] = describe([*written, *changed])
        return claims


def _with_values(recipe: Recipe, values: Mapping[str, Any]) -> Recipe:
    """The recipe with other values, checked again; null removes an option of the network."""
    if not values:
        return recipe
    tree = recipe.model_dump(mode="json")
    for field, value in values.items():
        *sections, name = field.split(".")
        node = tree
        for section in sections:
            node = node[section]
        if field.startswith("model.options."):
            node.pop(name, None)
        else:
            node[name] = value
    try:
        return Recipe.model_validate(tree)
    except ValidationError as error:
        causes = [detail.get("ctx", {}).get("error") for detail in error.errors(include_url=False)]
        found = [item for cause in causes if isinstance(cause, ContradictionError) for item in cause.found]
        raise RecipeError(
            printable_lines(
                "the recipe cannot be fitted to its model and data:",
                *(f"    {item.fields[0]}: {item.text}" for item in found),
            ),
            hint=one_of(*(cure for item in found for cure in item.cures)),
        ) from error


def fit_to_model(resolved: Resolved, options: Collection[str] | None) -> Resolved:
    """Drop what the preset wrote for its own network; `options` are those of the chosen one, None: unknown."""
    preset, name = resolved.preset, resolved.recipe.model.name
    if preset is None or preset.model.name == name:
        return resolved
    return resolved.with_changes(list(follow_model(preset, name, options, resolved.explicit)))


def fit_to_data(resolved: Resolved, num_train: int, num_classes: int) -> Resolved:
    """Fit the batch and what depends on the number of steps per epoch to the training set."""
    explicit = resolved.explicit
    if changes := list(follow_data(resolved.recipe, num_train, explicit)):
        note = rate_note(resolved.recipe, int(str(changes[0].new)), explicit)
        resolved = resolved.with_changes(changes, [note] if note else [])
    if num_train > 0:
        per_epoch = steps_per_epoch(resolved.recipe, num_train)
        preset, length = resolved.preset, resolved.recipe.length
        if preset is not None and preset.length.unit != length.unit:
            schedule = resolved.recipe.schedule.name
            resolved = resolved.with_changes(list(follow_length(preset, length, schedule, explicit, per_epoch)))
        total = length_steps(length, per_epoch)
        warmup = duration_steps(resolved.recipe.schedule.warmup, per_epoch, total)
        resolved = resolved.with_changes(list(shorten_warmup(resolved.recipe, warmup, total, explicit)))
    if is_about_other_data(resolved.recipe, num_classes):
        resolved = resolved.without_claims(f"other data, with {num_classes} classes")
    return resolved
