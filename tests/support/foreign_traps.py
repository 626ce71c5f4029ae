"""Traps for commands that open what a stranger sent: every field that may name a file, an address or code, and what a
stranger may write there.

A field of the recipe is one whose schema accepts the trap. Of the other files of a run or an export, every text counts.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from reconv.recipe.schema import Recipe

CANARY = "canary-5b1f"  # in files beside the folder; nothing of it may be printed, copied or sent
OUTSIDE, FOLDER = "outside", "foreign"
TRAPS = {
    "a file of code": "{folder}/evil.py:make",
    "a module": "evil:make",
    "a function of Python": "os:system",
    "a web server": "http://127.0.0.2:9/x",
    "an object store": "s3://stranger/x",
    "a file address": "file://{outside}/secret.txt",
    "a file": "{outside}/secret.txt",
    "a file above": "../outside/secret.txt",
    "a link": "{folder}/linked",
    "a command": "$(touch owned)`touch owned`|touch owned",
    "escapes": "\x1b]0;owned\x07\x1b[31m\rred",
}
# Values of fields that are nothing by default.
_SECTIONS: Mapping[str, Any] = {
    "expect": {"metric": "top1", "value": 0.5, "on": "", "source": ""},
}
_MAX_TEXTS = 3  # of a list


def trap_text(name: str, base: Path) -> str:
    """Text that a trap writes into a field, for a foreign folder in `base`."""
    return TRAPS[name].format(folder=base / FOLDER, outside=base / OUTSIDE)


@cache
def recipe_fields() -> tuple[tuple[str, str, str], ...]:
    """Every (field, trap, shape) that the schema of recipes accepts; the shape is `text`, `list` or `options`."""
    found = []
    for field in _leaves(Recipe, ()):
        for trap in TRAPS:
            text = trap_text(trap, Path("/base"))
            shapes = (shape for shape in ("text", "list", "options") if _is_accepted(field, shaped(text, shape)))
            found += [(".".join(field), trap, shape) for shape in list(shapes)[:1]]
    for section, value in _SECTIONS.items():
        names = [name for name, inner in value.items() if inner == ""]
        found += [(f"{section}.{name}", trap, "text") for name in names for trap in TRAPS]
    return tuple(found)


def shaped(text: str, shape: str) -> Any:
    """A text as the value of a field."""
    return {"text": text, "list": [text], "options": {"weights": text, "path": text, "root": text}}[shape]


def _leaves(model: type[BaseModel], at: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    defaults = model()
    for name in model.model_fields:
        value = getattr(defaults, name)
        if isinstance(value, BaseModel):
            yield from _leaves(type(value), (*at, name))
        else:
            yield (*at, name)


def _is_accepted(field: tuple[str, ...], value: object) -> bool:
    """True if the schema has no objection to this value of this field."""
    tree: Any = value
    for name in reversed(field):
        tree = {name: tree}
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        return not any(each["loc"][: len(field)] == field for each in error.errors())
    except Exception:  # of a combination of fields
        return True
    return True


def set_recipe_field(recipe: dict[str, Any], field: str, value: object) -> None:
    """Set a dotted field of a recipe's tree, also in a section that is nothing by default."""
    *sections, last = field.split(".")
    for section in sections:
        if not isinstance(recipe.get(section), dict):
            recipe[section] = dict(_SECTIONS.get(section, {}))
        recipe = recipe[section]
    recipe[last] = value


Place = tuple[str | int, ...]


def text_places(content: object, at: Place = ()) -> Iterator[Place]:
    """Where the texts of a JSON document are; of a list those of its first items, and the names of the last field."""
    if isinstance(content, str):
        yield at
    elif isinstance(content, dict):
        for name, value in content.items():
            yield from text_places(value, (*at, name))
    elif isinstance(content, list):
        for number, value in enumerate(content[:_MAX_TEXTS]):
            yield from text_places(value, (*at, number))


def set_place(content: Any, place: Place, value: object) -> None:
    """Replace the text at a place."""
    *parents, last = place
    for part in parents:
        content = content[part]
    content[last] = value


def json_documents(file: Path) -> list[Any]:
    """The JSON documents of a file: one, or one per line."""
    text = file.read_text()
    return [json.loads(line) for line in text.splitlines()] if file.suffix == ".jsonl" else [json.loads(text)]
