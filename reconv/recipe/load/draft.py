"""The recipe while it is merged: a tree of plain values with the origin of every key, and the problems found so far.

`validate_draft` makes it a recipe, or raises all its problems.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError
from pydantic_core import ErrorDetails

from reconv.core.errors import RecipeError
from reconv.core.text import printable_lines
from reconv.recipe.load import document
from reconv.recipe.load.explain import explain
from reconv.recipe.parts.contradiction import ContradictionError
from reconv.recipe.parts.schedule import SCHEDULES, ScheduleConfig
from reconv.recipe.schema import Recipe, is_derived, schema_fields

OVERRIDES = 1_000_000  # the layer of overrides, after every file
_ABSENT = object()
_MAX_EXPLAINED = 100  # problems of a recipe


@dataclass(frozen=True, slots=True, order=True)
class Origin:
    """Origin of a value; problems are reported in this order."""

    layer: int  # 0: the requested file, then what it extends; overrides last
    line: int
    text: str


@dataclass(slots=True)
class Draft:
    """The merged tree with the origin of every key, and the problems found so far."""

    tree: dict[str, Any] = field(default_factory=dict)
    origins: dict[document.Path, Origin] = field(default_factory=dict)
    problems: list[tuple[Origin, str]] = field(default_factory=list)
    cures: list[str] = field(default_factory=list)  # options that resolve problems
    num_own: int = 0  # layers of files that are not presets; they come first
    overridden: dict[str, Any] = field(default_factory=dict)  # fields whose override may change the result
    per_device: int | None = None  # batch size per device, where it was given so

    def put(self, path: document.Path, value: Any, origin: Origin) -> None:
        """Set a value; mappings are merged key by key."""
        node = self.tree
        for depth, key in enumerate(path[:-1], 1):
            if not isinstance(node.get(key), dict):
                self._forget(path[:depth])
                node[key] = {}
                self.origins[path[:depth]] = origin
            node = node[key]
        if isinstance(value, dict) and isinstance(node.get(path[-1]), dict):
            self.origins[path] = origin
            return
        self._forget(path)
        node[path[-1]] = {} if isinstance(value, dict) else value
        self.origins[path] = origin

    def _forget(self, path: document.Path) -> None:
        for known in [p for p in self.origins if p[: len(path)] == path]:
            del self.origins[known]

    def drop(self, key: str) -> None:
        """Remove a top-level key."""
        self.tree.pop(key, None)
        self._forget((key,))

    def drop_claims(self, changed: Mapping[str, Any], origin: Origin) -> None:
        """Drop the expected result, and note the fields that invalidate the description."""
        if self.origin(("expect",)).layer != OVERRIDES:
            self.drop("expect")
        if origin.layer == OVERRIDES:
            self.overridden |= changed

    def switch_schedule(self, name: object) -> None:
        """Remove fields that a newly chosen schedule does not use: they were meant for the old one."""
        written = self.tree.get("schedule")
        if name not in list(SCHEDULES) or not isinstance(written, dict) or written.get("name") == name:
            return
        used = SCHEDULES[str(name)].fields
        for key in [key for key in written if key in ScheduleConfig.model_fields and key not in used]:
            del written[key]
            self._forget(("schedule", key))

    def explicit(self) -> frozenset[str]:
        """The fields that the user wrote, in files or as overrides."""
        own = [p for p, origin in self.origins.items() if origin.layer == OVERRIDES or origin.layer < self.num_own]
        return frozenset(".".join(path) for path in own)

    def is_nearer(self, name: str, other: str) -> bool:
        """True if a field was written by an override or in a file nearer to the requested one than another field."""
        paths = [tuple(field.split(".")) for field in (name, other)]
        layers = [self.origins[path].layer if path in self.origins else OVERRIDES - 1 for path in paths]
        first, second = (-1 if layer == OVERRIDES else layer for layer in layers)
        return first < second

    def value(self, path: document.Path, default: Any = None) -> Any:
        """The value of a key, or the default without one."""
        node: Any = self.tree
        for key in path:
            if not isinstance(node, dict) or key not in node:
                return default
            node = node[key]
        return node

    def holds(self, path: document.Path, value: Any) -> bool:
        """True if a key already has this value."""
        return bool(self.value(path, default=_ABSENT) == value)

    def fixed(self) -> frozenset[str]:
        """The fields that `derive` must not change: overrides, and what its file or a nearer one sets."""
        derives = self.origins.get(("derive",), Origin(-1, 0, "")).layer
        nearest = -1 if derives == OVERRIDES else derives
        return frozenset(
            ".".join(path)
            for path, origin in self.origins.items()
            if (origin.layer == OVERRIDES or origin.layer <= nearest) and not isinstance(self.value(path), dict)
        )

    def open_fields(self) -> frozenset[str]:
        """The fields that are to be derived from the data."""
        named, fixed = self.value(("derive",), ()), self.fixed()
        names = [name for name in named if isinstance(name, str)] if isinstance(named, (list, tuple)) else []
        return frozenset(field for field in schema_fields() if is_derived(field, names) and field not in fixed)

    def origin(self, path: document.Path) -> Origin:
        """The origin of a key, or of the nearest section around it."""
        while path and path not in self.origins:
            path = path[:-1]
        return self.origins[path] if path else Origin(0, 0, "recipe")

    def latest(self, fields: Sequence[str]) -> Origin:
        """The origin that decides these fields: an override, else the file closest to the requested one."""
        paths = [tuple(field.split(".")) for field in fields]
        written = [self.origins[path] for path in paths if path in self.origins]
        return max(
            written or [self.origin(path) for path in paths],
            key=lambda origin: (origin.layer == OVERRIDES, -origin.layer, origin.line),
        )


def recipe_error(shown: str, problems: Sequence[tuple[Origin, str]], hint: str) -> RecipeError:
    """The error that lists the problems in the order of the files."""
    ordered = sorted(dict.fromkeys(problems))
    count = f"{len(ordered)} problem{'' if len(ordered) == 1 else 's'}"
    lines = [f"  {origin.text}: {text}" for origin, text in ordered]
    return RecipeError(printable_lines(f"{count} in the recipe {shown}", *lines), hint=hint)


def validate_draft(draft: Draft) -> Recipe | None:
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
