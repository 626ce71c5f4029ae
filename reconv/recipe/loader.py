"""Load a recipe: YAML files, `extends` and overrides become a `Recipe`, with the origin of each value.

`load` returns a valid recipe or raises one `RecipeError` that lists every problem with its file and line. What a user
did not write follows what they did (`adapt`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import replace
from pathlib import Path
from typing import Any

from reconv.core.custom_code import is_file_path
from reconv.core.errors import one_of
from reconv.recipe.load import document
from reconv.recipe.load.adapt import describe, fit_to_changes, show, use_written_rates
from reconv.recipe.load.draft import OVERRIDES, Draft, Origin, recipe_error, validate_draft
from reconv.recipe.load.extends import PATH_FIELDS, RecipeLayer, absolute_path, anchor_code, read_chain
from reconv.recipe.load.identity import may_change
from reconv.recipe.load.resolved import Resolved
from reconv.recipe.parts.code import references_in
from reconv.recipe.schema import Recipe, flatten, takes_null, takes_only_text
from reconv.recipe.units import BatchPerDevice, split_rate
from reconv.storage import read_limits

Override = tuple[str, object, str]  # dotted path, value (text is parsed as YAML), origin for messages

_OWN_FIELDS = ("name", "description", "published", "measured")  # not inherited: they are about one file
_DERIVED = Origin(OVERRIDES - 3, 0, "derived")  # values that follow from the data


def load(name_or_path: str, overrides: Sequence[Override] = (), derived: Sequence[Override] | None = None) -> Resolved:
    """Load a preset or a recipe file with overrides, or raise RecipeError with all problems.

    `derived` are the values of the fields that the recipe leaves to the data; None: they are not known yet.
    """
    layers = read_chain(name_or_path)
    draft, preset = _merge(layers)
    _add_overrides(draft, overrides)
    explicit = draft.explicit()
    changes = use_written_rates(draft, explicit)
    notes: list[str] = []
    if draft.overridden and "description" not in [name for name, *_ in overrides]:
        changed = [f"{name} {show(value)}" for name, value in draft.overridden.items()]
        draft.put(("description",), describe(changed), Origin(OVERRIDES, 0, "options"))
        explicit -= {"description"}
    base = None if preset is None or not explicit else Recipe.model_validate(preset)
    if base is not None:
        fitted, notes = fit_to_changes(draft, base, explicit | draft.open_fields())
        changes += fitted
    fixed = draft.fixed()
    if derived is not None:
        _add_derived(draft, derived)
        explicit |= {name for name, *_ in derived}
    _set_code_path(draft, layers)
    recipe = validate_draft(draft)
    if recipe is None or draft.problems:
        hint = one_of(*draft.cures) if draft.cures else _all_fields(layers)
        raise recipe_error(layers[0].shown, draft.problems, hint)
    return Resolved(
        recipe,
        origins={name: _origin_text(draft, name) for name in flatten(recipe)},
        file=layers[0].path,
        header=layers[0].header,
        preset=base,
        explicit=explicit,
        changes=tuple(changes),
        notes=tuple(notes),
        fixed=fixed,
    )


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every value; `load` reads it back equal."""
    return document.write(recipe.model_dump(mode="json"))


def _merge(layers: Sequence[RecipeLayer]) -> tuple[Draft, dict[str, Any] | None]:
    """The files of a recipe merged, and the tree of the preset that they are made from, if there is one."""
    draft = Draft(num_own=sum(not layer.is_preset for layer in layers))
    preset: dict[str, Any] | None = None
    for depth in reversed(range(len(layers))):
        _add_layer(draft, layers[depth], depth)
        if depth == draft.num_own:
            preset = deepcopy(draft.tree)
    if ("name",) not in draft.origins:
        stem = re.sub(r"^\W+|[^\w .+-]", "-", layers[0].path.stem)[:100]
        draft.put(("name",), stem if re.match(r"\w", stem) else "recipe", Origin(0, 0, "file name"))
    return draft, preset


def _add_layer(draft: Draft, layer: RecipeLayer, depth: int) -> None:
    def at(line: int) -> Origin:
        return Origin(depth, line, f"{layer.shown}:{line}")

    draft.problems += [(at(problem.line), problem.text) for problem in layer.content.problems]
    if any(_changes_result(draft, path, value) for path, value in _keys(layer.content.tree, ())):
        draft.drop("expect")  # another network or length invalidates it, unless this file gives a new one
    section = layer.content.tree.get("schedule")
    draft.switch_schedule(section.get("name") if isinstance(section, dict) else None)
    for path, value in _keys(layer.content.tree, ()):
        if path[0] != "extends" and (depth == 0 or path[0] not in _OWN_FIELDS):
            draft.put(path, value, at(layer.content.lines.get(path, 0)))


def _changes_result(draft: Draft, path: document.Path, value: Any) -> bool:
    """True if setting a key may change the result of a recipe; the expected result holds for every seed."""
    if isinstance(value, dict) or path in (("seed",), ("extends",)):
        return False
    return not may_change(".".join(path)) and not draft.holds(path, value)


def _keys(tree: Mapping[str, Any], prefix: document.Path) -> Iterator[tuple[document.Path, Any]]:
    """Every key of a tree, outer keys first."""
    for key, value in tree.items():
        yield (*prefix, key), value
        if isinstance(value, dict):
            yield from _keys(value, (*prefix, key))


def _add_overrides(draft: Draft, overrides: Sequence[Override]) -> None:
    draft.switch_schedule(_chosen_schedule(overrides))
    for override in sorted(overrides, key=lambda override: override[0].startswith("expect")):
        _add_override(draft, override)


def _add_override(draft: Draft, override: Override) -> None:
    name, value, origin_text = override
    origin = Origin(OVERRIDES, len(draft.problems), origin_text)
    path = tuple(name.split("."))
    if "" in path or name == "extends" or len(path) > read_limits.NESTING:
        draft.problems.append((origin, f"{name!r:.80} is not a field; write SECTION.FIELD=VALUE"))
        return
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if isinstance(value, BatchPerDevice):
        draft.per_device = value.size
        value = value.size * value.num_devices
    if isinstance(value, str):
        value = _typed(name, value)
    if path in PATH_FIELDS and isinstance(value, str):
        value = absolute_path(value, Path())
    value = _value_at(anchor_code(_nested(path, value), Path()), path)
    if path == ("schedule", "lr") and "base_batch_size" in (rate := split_rate({"lr": value})):
        path, value = ("schedule",), rate
    elif path == ("schedule",) and isinstance(value, dict):
        value = split_rate(value)
    if _changes_result(draft, path, value):
        draft.drop_claims({name: value}, origin)
    draft.put(path, value, origin)
    if isinstance(value, dict):
        for inner, item in _keys(value, path):
            draft.put(tuple(str(key) for key in inner), item, origin)


def _nested(path: document.Path, value: Any) -> dict[str, Any]:
    """The tree with only this key."""
    for key in reversed(path):
        value = {key: value}
    return dict(value)


def _value_at(tree: Any, path: document.Path) -> Any:
    for key in path:
        tree = tree[key]
    return tree


def _chosen_schedule(overrides: Sequence[Override]) -> object:
    """The schedule name that overrides set, anywhere among them; None if they do not."""
    for name, value, _ in reversed(overrides):
        typed = document.read_value(value) if isinstance(value, str) and name.startswith("schedule") else value
        if name == "schedule.name":
            return typed
        if name == "schedule" and isinstance(typed, dict) and "name" in typed:
            return typed["name"]
    return None


def _typed(name: str, text: str) -> Any:
    """The value of text given for a field: parsed as YAML, except for text fields."""
    value = document.read_value(text)
    if takes_only_text(name):
        return None if value is None and takes_null(name) else text
    return value


def _add_derived(draft: Draft, derived: Sequence[Override]) -> None:
    """Set the values of derived fields; nothing is left to derive then."""
    for name, value, origin in derived:
        draft.put(tuple(name.split(".")), value, replace(_DERIVED, text=origin))
    draft.put(("derive",), [], _DERIVED)


def _set_code_path(draft: Draft, layers: Sequence[RecipeLayer]) -> None:
    """Set the folders to import modules from, unless the recipe does: the folders of its files and the current one."""
    if ("code_path",) in draft.origins or all(is_file_path(path) for _, path in references_in(draft.tree)):
        return
    folders = [str(layer.path.parent) for layer in layers if not layer.is_preset]
    draft.put(("code_path",), list(dict.fromkeys([*folders, os.getcwd()])), Origin(0, 0, "default"))


def _origin_text(draft: Draft, field: str) -> str:
    path = tuple(field.split("."))
    return draft.origins[path].text if path in draft.origins else "default"


def _all_fields(layers: Sequence[RecipeLayer]) -> str:
    """A hint that fits the recipe: the preset it is made from, or the quick start of its task."""
    presets = [layer.path.stem for layer in layers if layer.is_preset]
    is_detector = any(layer.content.tree.get("task") == "detection" for layer in layers)
    name = presets[0] if presets else "quickstart-detection" if is_detector else "quickstart"
    return f"`reconv recipes show {name}` lists all fields"
