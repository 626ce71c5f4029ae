"""Load a recipe: YAML files, `extends` and overrides become a `Recipe`, with the origin of each value.

`load` returns a valid recipe or raises one `RecipeError` that lists every problem with its file and line. What a user
did not write follows what they did (`adapt`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from reconv.custom_code import anchor, is_file_path
from reconv.errors import RecipeError, one_of
from reconv.io import read_limits
from reconv.io.atomic import system_error
from reconv.io.object_store.object_store import is_url
from reconv.io.transient import is_machine_fault
from reconv.printable import printable_lines
from reconv.recipe import yaml_document as document
from reconv.recipe.adapt import Change, describe, follow_batch, follow_length, literal_rate, rate_note, show
from reconv.recipe.batch_fields import BatchConfig
from reconv.recipe.code_fields import map_import_paths, references_in
from reconv.recipe.draft import OVERRIDES, Draft, Origin
from reconv.recipe.explain import explain
from reconv.recipe.fields import flatten, takes_null, takes_only_text
from reconv.recipe.presets import PRESETS, nearest, preset_names, preset_path
from reconv.recipe.resolved import Resolved
from reconv.recipe.rules.contradiction import ContradictionError
from reconv.recipe.rules.schedule_rules import SCHEDULE_FIELDS
from reconv.recipe.schedule_fields import ScheduleConfig
from reconv.recipe.schema import Recipe
from reconv.recipe.units import BatchPerDevice, Duration, split_rate

Override = tuple[str, object, str]  # dotted path, value (text is parsed as YAML), origin for messages

_OWN_FIELDS = ("name", "description", "published", "measured")  # not inherited: they are about one file
_PATH_FIELDS = (("data", "path"), ("model", "init"), ("distill", "teacher"))
_MAY_CHANGE = (
    *("name", "description", "expect", "published", "measured", "code_path", "callbacks"),
    *(
        "data.path",
        "data.num_workers",
        "data.prefetch",
        "data.cache",
        "data.backend",
        "data.transfer_dtype",
        "data.bad_images",
    ),
    *("engine.num_threads", "engine.cpu_affinity", "loggers", "profile"),
    *("parallel.bucket_cap_mb", "parallel.heartbeat_timeout_s"),
)
_MAY_CHANGE_SECTIONS = ("log.", "save.", "expect.", "memory.")
_FITTED = Origin(OVERRIDES - 2, 0, "fitted")  # values that follow what the user wrote
_DERIVED = Origin(OVERRIDES - 3, 0, "derived")  # values that follow from the data
_MAX_EXPLAINED = 100  # problems of a recipe


@dataclass(frozen=True, slots=True)
class _Layer:
    """One file of an `extends` chain."""

    path: Path
    shown: str
    text: str
    content: document.Document

    @property
    def is_preset(self) -> bool:
        return self.path.is_relative_to(PRESETS)


def load(name_or_path: str, overrides: Sequence[Override] = (), derived: Sequence[Override] | None = None) -> Resolved:
    """Load a preset or a recipe file with overrides, or raise RecipeError with all problems.

    `derived` are the values of the fields that the recipe leaves to the data; None: they are not known yet.
    """
    layers = _read_chain(name_or_path)
    requested = layers[0]
    draft = Draft(num_own=sum(not layer.is_preset for layer in layers))
    preset: dict[str, Any] | None = None
    for depth in reversed(range(len(layers))):
        _add_layer(draft, layers[depth], depth)
        if depth == draft.num_own:
            preset = deepcopy(draft.tree)
    if ("name",) not in draft.origins:
        stem = re.sub(r"^\W+|[^\w .+-]", "-", requested.path.stem)[:100]
        draft.put(("name",), stem if re.match(r"\w", stem) else "recipe", Origin(0, 0, "file name"))
    draft.switch_schedule(_chosen_schedule(overrides))
    for override in sorted(overrides, key=lambda override: override[0].startswith("expect")):
        _add_override(draft, override)
    explicit = draft.explicit()
    changes, notes = _use_written_rates(draft, explicit), []
    if draft.overridden and "description" not in [name for name, *_ in overrides]:
        changed = [f"{name} {show(value)}" for name, value in draft.overridden.items()]
        draft.put(("description",), describe(changed), Origin(OVERRIDES, 0, "options"))
        explicit -= {"description"}
    base = None if preset is None or not explicit else Recipe.model_validate(preset)
    if base is not None:
        notes = _fit(draft, base, explicit | draft.open_fields(), changes)
    fixed = draft.fixed()
    for name, value, origin in derived or ():
        draft.put(tuple(name.split(".")), value, replace(_DERIVED, text=origin))
        explicit |= {name}
    if derived is not None:
        draft.put(("derive",), [], _DERIVED)
    _set_code_path(draft, layers)
    recipe = _validate(draft)
    if recipe is None or draft.problems:
        raise _error(requested.shown, draft.problems, one_of(*draft.cures) if draft.cures else _all_fields(layers))
    leaf_origins = {
        name: draft.origins[tuple(name.split("."))].text if tuple(name.split(".")) in draft.origins else "default"
        for name in flatten(recipe)
    }
    header = _header(requested.text)
    return Resolved(recipe, leaf_origins, requested.path, header, base, explicit, tuple(changes), tuple(notes), fixed)


def _use_written_rates(draft: Draft, explicit: frozenset[str]) -> list[Change]:
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


def _apply(draft: Draft, changes: Sequence[Change]) -> None:
    for change in changes:
        if change.is_field:
            draft.put(tuple(change.field.split(".")), change.new, _FITTED)


def _fit(draft: Draft, preset: Recipe, explicit: frozenset[str], earlier: list[Change]) -> list[str]:
    """Let what the user did not write follow the length and the batch size; adds the changes, returns notes."""
    changes: list[Change] = []
    notes: list[str] = []
    schedule = draft.value(("schedule", "name"), preset.schedule.name)
    used = SCHEDULE_FIELDS.get(schedule, ()) if isinstance(schedule, str) else ()
    with suppress(ValueError):  # an invalid length, which validation will report
        length = Duration.parse(draft.value(("length",), preset.length))
        if used:
            changes += follow_length(preset, length, schedule, explicit)
    size = draft.value(("batch", "size"), preset.batch.size)
    if isinstance(size, int) and size > 0:
        changes += follow_batch(preset, size, explicit, draft.per_device)
        note = rate_note(preset, size, explicit)
        notes += [note] if note else []
    if "end_lr" not in used:
        changes = [change for change in changes if change.field != "schedule.end_lr"]
    _apply(draft, changes)
    earlier += changes
    return notes


def dump(recipe: Recipe) -> str:
    """The recipe as YAML with every value; `load` reads it back equal."""
    return document.write(recipe.model_dump(mode="json"))


def differences(old: Recipe, new: Recipe) -> dict[str, tuple[Any, Any]]:
    """Leaves that differ, with old and new value (None where a recipe has no such leaf)."""
    before, after = flatten(old), flatten(new)
    names = [*before, *(name for name in after if name not in before)]
    return {n: (before.get(n), after.get(n)) for n in names if before.get(n) != after.get(n)}


def may_change(field: str) -> bool:
    """Whether a run may resume with another value of this leaf (a fingerprint protects the data itself)."""
    return field in _MAY_CHANGE or field.startswith(_MAY_CHANGE_SECTIONS)


def own_files(name_or_path: str) -> list[Path]:
    """The files of a recipe that are not presets: the requested one first, then those that it extends."""
    return [layer.path for layer in _read_chain(name_or_path) if not layer.is_preset]


def _read_chain(name_or_path: str) -> list[_Layer]:
    """The requested file, then what it extends, and so on."""
    path, shown = _locate(name_or_path, Path(), "")
    layers: list[_Layer] = []
    while True:
        if any(layer.path == path for layer in layers):
            chain = " -> ".join([*(layer.shown for layer in layers), shown])
            raise RecipeError("a recipe cannot extend itself", where=chain, then="remove one of the `extends`")
        layer = _read_preset(path, shown) if path.is_relative_to(PRESETS) else _read_layer(path, shown)
        layers.append(layer)
        parent = layer.content.tree.get("extends")
        if ("extends",) not in layer.content.lines:
            return layers
        where = f"{shown}:{layer.content.lines[('extends',)]}"
        if not isinstance(parent, str) or not parent:
            raise RecipeError("extends must be one recipe: the name of a preset or a file", where=where)
        path, shown = _locate(parent, path.parent, where)


def _locate(name: str, folder: Path, where: str) -> tuple[Path, str]:
    """The file of a preset or of a path relative to `folder`, and how to show it."""
    presets = preset_names()
    if name in presets:
        return preset_path(name), f"{name}.yaml"
    path = folder / os.path.expanduser(name)
    why = ""
    try:
        if path.is_file():
            return Path(os.path.abspath(path)), min(os.path.relpath(path), str(path), key=len) if where else name
        why = "" if not path.exists() else "it is a folder" if path.is_dir() else "it is not a regular file"
        beside = Path(f"{path}.yaml").is_file()
    except OSError as error:
        if is_machine_fault(error):
            raise system_error(error) from error
        beside = False
    except ValueError:  # not a valid file name
        beside = False
    if beside:
        hint = f"did you mean the file {name}.yaml?"
    elif path.suffix in (".yaml", ".yml") or "/" in name:
        hint = "check the path; `reconv recipes` lists the presets"
    else:
        near = nearest(name, presets)
        hint = f"did you mean {near}?" if near else "`reconv recipes` lists the presets"
    raise RecipeError(f"recipe {name!r} not found", where=where, why=why, then=hint)


@cache
def _read_preset(path: Path, shown: str) -> _Layer:
    return _read_layer(path, shown)


def _read_layer(path: Path, shown: str) -> _Layer:
    text = document.read_file(path)
    content = document.read(text)
    if content.broken:
        problems = [(Origin(0, p.line, f"{shown}:{p.line}"), p.text) for p in content.problems]
        raise _error(shown, problems, then="correct this line; the rest of the file was not read")
    if len(content.lines) > read_limits.RECIPE_KEYS:
        why = f"it has {len(content.lines):,} keys, and a recipe has at most {read_limits.RECIPE_KEYS:,}"
        raise RecipeError("this is not a recipe", where=str(path), why=why)
    if not content.tree and not content.problems:
        raise RecipeError("the recipe is empty", where=str(path), then="start with, for example, extends: resnet50")
    _split_schedule(content)
    for section, name in _PATH_FIELDS:
        part = content.tree.get(section)
        if isinstance(part, dict) and isinstance(part.get(name), str):
            part[name] = _anchor(part[name], path.parent)
    content.tree = _anchor_code(content.tree, path.parent)
    return _Layer(path, shown, text, content)


def _split_schedule(content: document.Document) -> None:
    """Split `0.256 per 256` into lr and base_batch_size, so that it replaces both of the recipe it extends."""
    section = content.tree.get("schedule")
    if isinstance(section, dict):
        content.tree["schedule"] = split_rate(section)
        content.lines.setdefault(("schedule", "base_batch_size"), content.lines.get(("schedule", "lr"), 0))


def _anchor(value: str, folder: Path) -> str:
    """An absolute path; URLs and names like torchvision:resnet50 stay."""
    if not value or is_url(value) or value.startswith(("torchvision:", "timm:")):
        return value
    return os.path.abspath(folder / os.path.expanduser(value))


def _anchor_code(tree: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """The tree with absolute paths of the files and folders of the user's own code."""
    anchored = map_import_paths(tree, lambda name, field: anchor(name, folder))
    folders = anchored.get("code_path")
    if isinstance(folders, list):
        anchored["code_path"] = [_anchor(item, folder) if isinstance(item, str) else item for item in folders]
    return anchored


def _set_code_path(draft: Draft, layers: Sequence[_Layer]) -> None:
    """Where modules are imported from, unless the recipe says so: the folders of its files and the current one."""
    if ("code_path",) in draft.origins or all(is_file_path(path) for _, path in references_in(draft.tree)):
        return
    folders = [str(layer.path.parent) for layer in layers if not layer.path.is_relative_to(PRESETS)]
    draft.put(("code_path",), list(dict.fromkeys([*folders, os.getcwd()])), Origin(0, 0, "default"))


def _add_layer(draft: Draft, layer: _Layer, depth: int) -> None:
    def at(line: int) -> Origin:
        return Origin(depth, line, f"{layer.shown}:{line}")

    draft.problems += [(at(problem.line), problem.text) for problem in layer.content.problems]
    if any(_changes_result(draft, path, value) for path, value in _keys(layer.content.tree, ())):
        draft.drop(
            "expect"
        )  # another network or length invalidates the expected result, unless this file gives a new one
    section = layer.content.tree.get("schedule")
    draft.switch_schedule(section.get("name") if isinstance(section, dict) else None)
    for path, value in _keys(layer.content.tree, ()):
        if path[0] != "extends" and (depth == 0 or path[0] not in _OWN_FIELDS):
            draft.put(path, value, at(layer.content.lines.get(path, 0)))


def _changes_result(draft: Draft, path: document.Path, value: Any) -> bool:
    """Whether setting a key may change the result of a recipe; the expected result holds for every seed."""
    if isinstance(value, dict) or path in (("seed",), ("extends",)):
        return False
    return not may_change(".".join(path)) and not draft.holds(path, value)


def _keys(tree: Mapping[str, Any], prefix: document.Path) -> Iterator[tuple[document.Path, Any]]:
    """Every key of a tree, outer keys first."""
    for key, value in tree.items():
        yield (*prefix, key), value
        if isinstance(value, dict):
            yield from _keys(value, (*prefix, key))


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
    if path in _PATH_FIELDS and isinstance(value, str):
        value = _anchor(value, Path())
    value = _value_at(_anchor_code(_nested(path, value), Path()), path)
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


def _validate(draft: Draft) -> Recipe | None:
    """The recipe, or None with all problems added to the draft: invalid values are set aside to check the rest."""
    faulty: set[str] = set()
    tree = draft.tree
    while True:
        try:
            return Recipe.model_validate(tree)
        except ValidationError as error:
            details = error.errors(include_url=False)
        causes = [detail.get("ctx", {}).get("error") for detail in details]
        contradictory = [cause for cause in causes if isinstance(cause, ContradictionError)]
        for cause in contradictory:
            for item in (c for c in cause.found if not faulty.intersection(c.fields)):
                draft.problems.append((draft.latest(item.fields), f"{item.fields[0]}: {item.text}"))
                draft.cures += item.cures
        if contradictory:
            return None
        by_path: dict[document.Path, list[ErrorDetails]] = {}
        for detail in details:
            by_path.setdefault(_place(draft.tree, detail), []).append(detail)
        for number, (path, group) in enumerate(by_path.items()):
            if number < _MAX_EXPLAINED:  # each is compared with all fields
                draft.problems.append((draft.origin(path), explain(path, group)))
            faulty.add(".".join(path))
        tree = _without(tree, set(by_path))


def _place(tree: Any, detail: ErrorDetails) -> document.Path:
    """The keys an error is about: its location without union members and list indices."""
    path: list[str] = []
    for part in detail["loc"]:
        if isinstance(tree, dict) and part in tree:
            path.append(str(part))
            tree = tree[part]
        elif detail["type"] == "missing" and isinstance(tree, dict):
            path.append(str(part))
        else:
            break
    return tuple(path)


def _without(tree: Mapping[str, Any], faulty: set[document.Path], prefix: document.Path = ()) -> dict[str, Any]:
    """The tree without invalid values; a section that lacks a required value is removed."""
    kept: dict[str, Any] = {}
    for key, value in tree.items():
        path = (*prefix, key)
        lacking = isinstance(value, dict) and any(p[:-1] == path and p[-1] not in value for p in faulty)
        if path not in faulty and not lacking:
            kept[key] = _without(value, faulty, path) if isinstance(value, dict) else value
    return kept


def _all_fields(layers: Sequence[_Layer]) -> str:
    """A hint that fits the recipe: the preset it is made from, or the quick start of its task."""
    presets = [layer.path.stem for layer in layers if layer.is_preset]
    is_detector = any(layer.content.tree.get("task") == "detection" for layer in layers)
    name = presets[0] if presets else "quickstart-detection" if is_detector else "quickstart"
    return f"`reconv recipes show {name}` lists all fields"


def _error(shown: str, problems: Sequence[tuple[Origin, str]], then: str) -> RecipeError:
    ordered = sorted(dict.fromkeys(problems))
    count = f"{len(ordered)} problem{'' if len(ordered) == 1 else 's'}"
    lines = [f"  {origin.text}: {text}" for origin, text in ordered]
    return RecipeError(printable_lines(f"{count} in the recipe {shown}", *lines), then=then)


def _header(text: str) -> str:
    """The leading comment of a file, without the # signs."""
    lines = []
    for line in text.splitlines():
        if not line.startswith("#"):
            break
        lines.append(line.lstrip("#").removeprefix(" ").rstrip())
    return "\n".join(lines).strip()
