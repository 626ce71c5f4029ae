"""The preset that needs the fewest changes to be a wanted recipe, computed on resolved recipes."""

from __future__ import annotations

import contextlib
import math
import os
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import cache, cached_property
from typing import Any

from reconv.core.errors import RecipeError
from reconv.recipe.load.adapt import length_fields
from reconv.recipe.load.unused import unused_options
from reconv.recipe.loader import Override, load
from reconv.recipe.presets import preset_names, preset_vendor
from reconv.recipe.schema import Recipe, flatten

_CANDIDATES = 8  # presets of which the exact changes are computed
_SLACK = 1  # changes that may follow from others
_MAX_ROUNDS = 5  # a change may make others follow it


@dataclass(frozen=True, slots=True)
class PresetMatch:
    """A preset, the changes that make it the wanted recipe, and that recipe."""

    preset: str
    changes: Mapping[str, Any]
    recipe: Recipe


def closest_preset(wanted: Recipe, matters: Callable[[str], bool], vendor: str, hint: str = "") -> PresetMatch | None:
    """The preset with the fewest changes; of equals the vendor's own, then the one whose name is most like `hint`.

    `matters` says which fields have to be equal. None: no preset can be changed into the recipe.
    """
    ranked = []
    target = _Target(wanted, matters)
    for name, preset in _presets().items():
        recipe = preset.recipe
        if recipe.task == wanted.task and not recipe.derive:
            count = len(target.differing_fields(preset))
            is_other = recipe.model.name != wanted.model.name
            likeness = SequenceMatcher(None, hint, name).ratio() if hint else 0.0
            ranked.append((count + 2 * is_other, preset_vendor(name) != vendor, -likeness, name))
    found: list[tuple[int, int, PresetMatch]] = []
    for rank, (count, _, _, name) in enumerate(sorted(ranked)[:_CANDIDATES]):
        if found and count > min(entry[0] for entry in found) + _SLACK:
            break
        match = _changed(name, target)
        if match is not None:
            other = 2 * (_presets()[name].recipe.model.name != wanted.model.name)  # rather the same network
            found.append((len(match.changes) + other, rank, match))
            if not match.changes:
                break
    return min(found, key=lambda entry: entry[:2])[2] if found else None


class _Candidate:
    """A recipe with what is compared of it, computed once: every command is compared with all presets."""

    def __init__(self, recipe: Recipe) -> None:
        self.recipe = recipe

    @cached_property
    def values(self) -> dict[str, Any]:
        return flatten(self.recipe)

    @cached_property
    def unused(self) -> set[str]:
        return {name for name, _ in unused_options(self.recipe)}


@cache
def _presets() -> dict[str, _Candidate]:
    return {name: _Candidate(load(name).recipe) for name in preset_names()}


class _Target:
    """The wanted recipe, and which fields of another one differ from it."""

    def __init__(self, wanted: Recipe, matters: Callable[[str], bool]) -> None:
        self.wanted = wanted
        self._values = flatten(wanted)
        self._unused = _unused_names(wanted)
        self._rate = _effective_rate(wanted)
        self._matters = cache(matters)

    def differing_fields(self, candidate: _Candidate) -> list[str]:
        """The fields that matter and differ; not those without effect in both, nor equal rates for other batches."""
        here, there = candidate.values, self._values
        names = [*there, *(name for name in here if name not in there)]
        differing = [
            name
            for name in names
            if here.get(name) != there.get(name) and self._matters(name) and not _is_same_path(here, there, name)
        ]
        if not differing:
            return []
        ignored = {"schedule.base_batch_size", "model.options", "data.options", "loss.options"}
        if _is_close(_effective_rate(candidate.recipe), self._rate):
            ignored.add("schedule.lr")
        ignored |= candidate.unused & self._unused
        return [name for name in differing if name not in ignored]


def _is_same_path(here: Mapping[str, Any], there: Mapping[str, Any], name: str) -> bool:
    """True if weights are the same file: a loaded recipe has the whole path."""
    first, second = here.get(name), there.get(name)
    if name not in ("model.init", "model.resume_from") or not isinstance(first, str) or not isinstance(second, str):
        return False
    return os.path.abspath(first) == os.path.abspath(second)


def _unused_names(wanted: Recipe) -> set[str]:
    """Fields that would have no effect in the wanted recipe, whatever their value."""
    tree = wanted.model_dump(mode="json")
    names = set()
    # `unused_options` skips defaults, so it is asked about a recipe in which such fields differ from them.
    for section, values in (
        ("augment", {"padding": 7, "scale": [0.5, 0.9], "attempts": 77, "fill": 1, "hflip_mode": "alternating"}),
        ("loss", {"smooth_over": "other-classes"}),
    ):
        tree[section] = {**tree[section], **values}
    tree["augment"]["mixup"] = {**tree["augment"]["mixup"], "partner": "permutation", "mode": "sample"}
    tree["augment"]["mixup"]["lam_at_least_half"] = True
    tree["schedule"] = {**tree["schedule"], "warmup_from": "zero"}
    if not wanted.augment.cutmix.enabled:
        tree["augment"]["cutmix"] = {"mode": "fixed", "lam": 1.0, "roll": 3}
    if wanted.checkpoint_average.last == "off":
        tree["checkpoint_average"] = {"mode": "exponential", "decay": 0.5}
    with contextlib.suppress(ValueError):
        names |= {name for name, _ in unused_options(Recipe.model_validate(tree))}
    return names | {name for name, _ in unused_options(wanted)}


def _effective_rate(recipe: Recipe) -> float | None:
    """The peak learning rate at the recipe's batch; None where milestones have rates of their own."""
    schedule = recipe.schedule
    if schedule.milestone_lrs:
        return None
    return schedule.lr * (recipe.batch.size / schedule.base_batch_size if schedule.base_batch_size else 1)


def _is_close(first: float | None, second: float | None) -> bool:
    return first is not None and second is not None and math.isclose(first, second, rel_tol=1e-9)


def _changed(preset: str, target: _Target) -> PresetMatch | None:
    """The preset with the changes it needs, or None if it cannot become the recipe."""
    changes: dict[str, Any] = {}
    for _ in range(_MAX_ROUNDS):
        recipe = _load(preset, changes)
        if recipe is None:
            # Another schedule or optimizer needs all of its fields at once.
            return None
        missing = target.differing_fields(_Candidate(recipe))
        if not missing:
            fewest = {**_pruned(preset, changes, target), **_kept_durations(preset, target.wanted)}
            return PresetMatch(preset, fewest, _load(preset, fewest) or recipe)
        changes |= {name: wanted_value(target.wanted, name) for name in _with_sections(missing)}
    return None


def _kept_durations(preset: str, wanted: Recipe) -> dict[str, Any]:
    """Durations in epochs that would follow the length, which is in steps there and not in the preset."""
    if _presets()[preset].recipe.length.unit == wanted.length.unit:
        return {}
    plain = {name: wanted_value(wanted, name) for name in length_fields(wanted.schedule.name, ())}
    return {
        name: value
        for name, value in plain.items()
        if name.startswith("schedule.") and value not in (None, [], "0ep") and re.search(r"\dep\b", str(value))
    }


def _with_sections(names: Collection[str]) -> list[str]:
    """The names with those first that decide what others may be."""
    first = ("task", "schedule.name", "optimizer.name", "precision.mode", "batch.size", "length", "model.name")
    return [*(name for name in first if name in names), *(name for name in names if name not in first)]


def _pruned(preset: str, changes: Mapping[str, Any], target: _Target) -> Mapping[str, Any]:
    """Changes without those that follow from the others."""
    kept = dict(changes)
    for name in list(changes):
        fewer = {key: value for key, value in kept.items() if key != name}
        recipe = _load(preset, fewer)
        if recipe is not None and not target.differing_fields(_Candidate(recipe)):
            kept = fewer
    return kept


def _load(preset: str, changes: Mapping[str, Any]) -> Recipe | None:
    overrides: list[Override] = [(name, value, "migrate") for name, value in changes.items()]
    try:
        return load(preset, overrides).recipe
    except RecipeError:
        return None


def wanted_value(wanted: Recipe, name: str) -> Any:
    """The value of a field as plain data; a rate is written with the batch size it is for."""
    if name == "schedule.lr" and wanted.schedule.base_batch_size is not None and not wanted.schedule.milestone_lrs:
        per = wanted.schedule.base_batch_size
        return f"{wanted.schedule.lr!r} per {'image' if per == 1 else per}"
    value: Any = wanted.model_dump(mode="json")
    for key in name.split("."):
        value = value.get(key) if isinstance(value, dict) else None
    return value
