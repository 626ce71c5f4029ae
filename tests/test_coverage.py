"""docs/coverage.md is made from docs/coverage.yaml; what it and the other pages tell people to type exists."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import pytest
import yaml
from pydantic import BaseModel, ValidationError

from reconv.cli import reconv as command_line
from reconv.errors import UsageError
from reconv.models import _SPECS as SPECS
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE: dict[str, Any] = yaml.safe_load((DOCS / "coverage.yaml").read_text(encoding="utf-8"))
ROWS: list[dict[str, Any]] = [row for section in TABLE["sections"].values() for row in section]
MODEL_OPTIONS = {field.name for spec in SPECS.values() for field in dataclasses.fields(spec)}


def _script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_coverage", DOCS / "make_coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


make_coverage = _script()


def uses(row: dict[str, Any]) -> Iterator[str]:
    """The commands and settings that a row names."""
    for text in (row.get("how", ""), *row.get("options", {}).values()):
        if isinstance(text, str):
            yield from make_coverage.split_uses(text)[0]


def command_exists(words: list[str]) -> bool:
    """Whether `command [subcommand] [--option [value]]` can be typed after `reconv`."""
    command: click.Command = command_line
    for word in words:
        if word.startswith("-"):
            return any(word in (*param.opts, *param.secondary_opts) for param in command.params)
        if not isinstance(command, click.Group) or word not in command.commands:
            return False
        command = command.commands[word]
    return command is not command_line


def field_exists(field: str) -> bool:
    """Whether a dotted name leads to a field of the recipe, or to an option of some model."""
    if field.startswith("model.options."):
        return field.removeprefix("model.options.") in MODEL_OPTIONS
    section: Any = Recipe
    for part in field.split("."):
        models = [kind for kind in _members(section) if isinstance(kind, type) and issubclass(kind, BaseModel)]
        found = [model.model_fields[part].annotation for model in models if part in model.model_fields]
        if not found:
            return False
        section = found[0]
    return True


def _members(annotation: Any) -> Iterator[Any]:
    """The types inside a union, or the type itself."""
    if isinstance(annotation, type):
        yield annotation
    else:
        for member in get_args(annotation):
            yield from _members(member)


def value_fits(field: str, text: str) -> bool:
    """Whether the field accepts this text, read as YAML; rules about other fields are left aside."""
    tree: Any = yaml.safe_load(text)
    if field == "model.name":
        return text in SPECS
    if field.startswith("model.options."):
        return any(_accepts(spec, field.rpartition(".")[2], tree) for spec in SPECS.values())
    for part in reversed(field.split(".")):
        tree = {part: tree}
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        return not any(".".join(map(str, detail["loc"])).startswith(field) for detail in error.errors())
    return True


def _accepts(spec: Any, option: str, value: Any) -> bool:
    try:
        dataclasses.replace(spec, **{option: value})
    except (TypeError, UsageError):
        return False
    return True


def is_true(use: str) -> bool:
    first, *rest = use.split()
    if first == "reconv":
        return command_exists(rest)
    if first == "recipe":
        return rest[0] in preset_names()
    field, _, value = use.partition("=")
    return field_exists(field) and (not value or value_fits(field, value))


def test_the_coverage_page_is_up_to_date() -> None:
    page = (DOCS / "coverage.md").read_text(encoding="utf-8")
    assert page == make_coverage.render(TABLE), "run: python docs/make_coverage.py"


def test_everything_named_in_the_coverage_table_exists() -> None:
    assert len(ROWS) > 190
    for row in ROWS:
        assert [use for use in uses(row) if not is_true(use)] == [], row["capability"]
        assert [name for name in row.get("tests", "").split() if name not in make_coverage.TESTS] == []
        assert ("missing" in row) == ("tests" not in row), row["capability"]


def test_every_field_that_the_docs_set_exists() -> None:
    pages = [*DOCS.rglob("*.md"), *DOCS.parent.glob("*.md")]
    fields = {(page.name, field) for page in pages for field in re.findall(r"--set '?([a-z_.0-9]+)=", page.read_text())}
    assert len(fields) > 30
    assert sorted(f"{page}: {field}" for page, field in fields if field != "a.b" and not field_exists(field)) == []


@pytest.mark.parametrize(
    "use",
    [
        "optimizer.momentun",
        "seed.seed",
        "model.options.no_such_option",
        "model.options.version=v3",
        "model.name=resnet51",
        "precision.mode=fp15",
        "reconv train --no-such-option",
        "reconv trian",
        "recipe no-such-recipe",
    ],
)
def test_a_name_that_does_not_exist_fails_the_check(use: str) -> None:
    assert not is_true(use)
