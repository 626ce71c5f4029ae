"""Write the migrated recipe as a YAML file, with the flag that each value comes from."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from reconv.core.errors import UsageError
from reconv.core.text import printable
from reconv.migrate.migration import Migration
from reconv.migrate.translation import Setting
from reconv.recipe.schema import Recipe, flatten

_COMMENT_COLUMN = 44
_WIDTH = 120


def recipe_text(migration: Migration, command: str) -> str:
    """The recipe: what it extends, what it changes and why, and where the other values come from."""
    if migration.program is None or migration.wanted is None:
        raise UsageError(
            "this command has no recipe", why=f"it becomes: {command or 'nothing'}", hint="leave out --write"
        )
    lines = [*_commented(f"Migrated by `reconv migrate` from {migration.program.title}:"), "#"]
    lines += _commented("  " + " ".join(migration.text.split()))
    lines += ["#", *_commented(f"command: {command}")] if command else []
    lines += [line for note in migration.notes for line in _commented(note)]
    match = migration.match
    if match is not None:
        lines.append(f"extends: {match.preset}")
        changes: Mapping[str, Any] = match.changes
    else:
        changes = {setting.field: setting.value for setting in migration.settings.values()}
    lines += list(_tree_lines(changes, migration.settings))
    if match is not None:
        lines += _inherited(migration, match.recipe, changes)
    return "\n".join(lines) + "\n"


def _tree_lines(changes: Mapping[str, Any], settings: Mapping[str, Setting]) -> Iterator[str]:
    """Nested YAML with the origin of each value."""
    tree: dict[str, Any] = {}
    for name, value in changes.items():
        node = tree
        *sections, leaf = name.split(".")
        for section in sections:
            node = node.setdefault(section, {})
        node[leaf] = _Leaf(value, _origin(name, settings))
    yield from _node_lines(tree, "")


class _Leaf:
    """A value and its origin."""

    def __init__(self, value: Any, origin: str) -> None:
        self.value = value
        self.origin = origin


def _node_lines(node: Mapping[str, Any], indent: str) -> Iterator[str]:
    for key, item in node.items():
        if not isinstance(item, _Leaf):
            yield f"{indent}{key}:"
            yield from _node_lines(item, f"{indent}  ")
            continue
        text = f"{indent}{key}: {_scalar(item.value)}"
        yield f"{text:<{_COMMENT_COLUMN}}  # {item.origin}" if item.origin else text


def _scalar(value: Any) -> str:
    text = yaml.safe_dump(value, default_flow_style=True, width=10_000, allow_unicode=True).strip()
    return text.removesuffix("\n...").removesuffix("...").strip()


def _origin(name: str, settings: Mapping[str, Setting]) -> str:
    setting = settings.get(name)
    return _one_line(setting.origin) if setting is not None else "their command does not have it"


def _inherited(migration: Migration, recipe: Recipe, changes: Mapping[str, Any]) -> list[str]:
    """Comments: values that the preset already has, and the flags they equal."""
    values = flatten(recipe)
    kept = [
        setting for setting in migration.settings.values() if setting.field not in changes and setting.field in values
    ]
    if not kept:
        return []
    lines = ["#", "# the preset already has:"]
    for setting in kept:
        value = values[setting.field]
        plain = list(map(str, value)) if isinstance(value, tuple) else str(value) if hasattr(value, "unit") else value
        text = f"#   {setting.field}: {_scalar(plain)}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  {_one_line(setting.origin)}")
    return lines


def _one_line(text: str) -> str:
    return printable(" ".join(text.split()))


def _commented(text: str) -> list[str]:
    """Comment lines of a long text."""
    lines, current = [], "#"
    for word in printable(text).split(" "):
        if len(current) + 1 + len(word) > _WIDTH and current != "#":
            lines.append(current)
            current = "#    "
        current += f" {word}"
    return [*lines, current]
