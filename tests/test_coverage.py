"""The coverage page is made from docs/coverage.yaml; what it and the other pages tell people to type exists."""

from __future__ import annotations

import dataclasses
import importlib.util
import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import pytest
import yaml
from pydantic import BaseModel, ValidationError

from reconv.cli import reconv as command_line
from reconv.core.errors import UsageError
from reconv.data.readers.dataset_factory import open_dataset
from reconv.models import _SPECS as SPECS
from reconv.recipe.parts.data import DataConfig
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe

DOCS = Path(__file__).resolve().parent.parent / "docs"
TABLE: dict[str, Any] = yaml.safe_load((DOCS / "coverage.yaml").read_text(encoding="utf-8"))
ROOT = DOCS.parent
ROWS: list[dict[str, Any]] = [row for section in TABLE["sections"].values() for row in section]
CHECKS: list[dict[str, str]] = [check for row in ROWS for check in row.get("check", [])]
MODEL_OPTIONS = {field.name for spec in SPECS.values() for field in dataclasses.fields(spec)}


def _script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DOCS / "generators" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look there
    spec.loader.exec_module(module)
    return module


make_coverage, check_coverage = _script("make_coverage"), _script("check_coverage")


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
            return word == "--help" or any(word in (*param.opts, *param.secondary_opts) for param in command.params)
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
    page = (DOCS / "coming-from" / "coverage.md").read_text(encoding="utf-8")
    assert page == make_coverage.render(TABLE), "run: python docs/generators/make_coverage.py"


def test_everything_named_in_the_coverage_table_exists() -> None:
    assert len(ROWS) > 190
    for row in ROWS:
        assert [use for use in uses(row) if not is_true(use)] == [], row["capability"]
        assert sum(state in row for state in make_coverage.STATES) <= 1, row["capability"]
        assert set(row.get("caveat", "").split()) <= set(TABLE["caveats"]), row["capability"]


def test_every_row_is_shown_by_commands_and_tests_that_exist() -> None:
    functions = {
        file: set(re.findall(r"^def (test_\w+)", (ROOT / file).read_text(encoding="utf-8"), re.M))
        for file in {check["test"].partition("::")[0] for check in CHECKS if "test" in check}
    }
    assert [row["capability"] for row in ROWS if not check_coverage.checks_of(row)] == []
    assert len(functions) > 60 and sum("run" in check for check in CHECKS) > 50
    for check in CHECKS:
        assert set(check) <= ({"test"} if "test" in check else {"run", "prints", "writes"}), check
        if "test" in check:
            file, _, name = check["test"].partition("::")
            assert name.partition("[")[0] in functions[file], check
        else:
            assert command_can_be_typed(shlex.split(check["run"])), check


def command_can_be_typed(words: list[str]) -> bool:
    """Whether the command and all of its options exist."""
    verbs: list[str] = []
    for word in words[1:]:
        if word.startswith("-") or not command_exists([*verbs, word]):
            break
        verbs.append(word)
    options = [word for word in words if word.startswith("--")]
    return words[0] == "reconv" and bool(verbs) and all(command_exists([*verbs, option]) for option in options)


@pytest.mark.parametrize(
    "check, why",
    [
        ({"run": "reconv recipes explain batch.group", "prints": "Ghost batch norm"}, ""),
        ({"run": "reconv recipes explain batch.group", "prints": "no such text"}, "'no such text' was not printed"),
        ({"run": "reconv recipes explain batch.grupp"}, "exit code 2:"),
        ({"run": "reconv recipes explain ema --json ema.json", "writes": "*.json"}, ""),
        ({"run": "reconv recipes explain ema", "writes": "*.json"}, "it did not write *.json"),
    ],
)
def test_the_check_of_a_command_passes_and_fails(check: dict[str, str], why: str, tmp_path: Path) -> None:
    (outcome,) = check_coverage.check_commands([{"capability": "a row", "check": [check]}], tmp_path)
    assert outcome.why.startswith(why) and bool(outcome.why) == bool(why)


def test_the_data_of_the_checks_is_imagenet_as_unpacked(tmp_path: Path) -> None:
    check_coverage.make_imagenet(tmp_path)
    assert [len(open_dataset("auto", tmp_path, split, DataConfig())) for split in ("train", "val")] == [24, 6]


@pytest.mark.slow
def test_the_check_of_a_test_passes_and_fails(tmp_path: Path) -> None:
    nodes = [f"tests/bench/test_timing.py::test_{name}" for name in ("percentile_equals_numpy", "no_such_test")]
    rows = [{"capability": node, "check": [{"test": node}]} for node in nodes]
    good, bad = check_coverage.check_tests(rows, tmp_path)
    assert good.why == "" and "not found" in bad.why


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
