"""docs/coverage.yaml is held to the list of capabilities; every field, verb, recipe and test it names must exist."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import Any, get_args

import click
import pytest
import yaml
from pydantic import BaseModel, ValidationError

from reconv.cli import reconv as command_line
from reconv.errors import UsageError
from reconv.models import _TABLE as SPECS
from reconv.models.architecture import Spec
from reconv.recipe.presets import preset_names
from reconv.recipe.schema import Recipe

ROOT = Path(__file__).resolve().parent.parent
WANTED: dict[str, Any] = yaml.safe_load((ROOT / "tests/fixtures/capabilities.yaml").read_text(encoding="utf-8"))


def _tool() -> ModuleType:
    """docs/make_coverage.py, under a name that does not hide the package `coverage`."""
    spec = importlib.util.spec_from_file_location("coverage_page", ROOT / "docs/make_coverage.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


tool = _tool()
TABLE = tool.read(ROOT / "docs/coverage.yaml")


def options_of(row: Any) -> set[str]:
    """Every option of a row as `SYSTEM spelling`."""
    return {
        f"{system} {spelling}" for option in row.options for system in option.systems for spelling in option.spellings
    }


def field_exists(field: str) -> bool:
    """Whether a dotted name leads to a field of the recipe; below model.options, to an option of some model."""
    section: Any = Recipe
    parts = field.split(".")
    if parts[:2] == ["model", "options"] and len(parts) == 3:
        return parts[2] in model_options()
    for part in parts:
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


@cache
def model_options() -> frozenset[str]:
    """The options that some model of the table takes."""
    return frozenset(field.name for spec in SPECS.values() for field in dataclasses.fields(spec))


def value_fits(field: str, text: str) -> bool:
    """Whether the schema takes this text, read as YAML, in this field; what other fields would say is left aside."""
    tree: Any = yaml.safe_load(text)
    if field.startswith("model.options."):
        return any(_takes(spec, field.rpartition(".")[2], tree) for spec in SPECS.values())
    for part in reversed(field.split(".")):
        tree = {part: tree}
    try:
        Recipe.model_validate(tree)
    except ValidationError as error:
        return not any(".".join(map(str, detail["loc"])).startswith(field) for detail in error.errors())
    return True


def _takes(spec: Spec, option: str, value: Any) -> bool:
    try:
        dataclasses.replace(spec, **{option: value})
    except (TypeError, UsageError):
        return False
    return True


def verb_exists(verb: str) -> bool:
    """Whether `verb [subverb] [--option]` can be typed after `reconv`."""
    command: click.Command = command_line
    for word in verb.split():
        if word.startswith("-"):
            return any(word in (*param.opts, *param.secondary_opts) for param in command.params)
        if not isinstance(command, click.Group) or word not in command.commands:
            return False
        command = command.commands[word]
    return command is not command_line


@cache
def functions_of(file: Path) -> frozenset[str]:
    """The names of the test functions of a file; a method is `Class::name`."""
    names: set[str] = set()
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.ClassDef):
            names |= {f"{node.name}::{item.name}" for item in node.body if isinstance(item, ast.FunctionDef)}
    return frozenset(name for name in names if name.rpartition("::")[2].startswith("test_"))


def is_a_test(test: str) -> bool:
    """Whether `path::name` is a test of this suite."""
    path, _, name = test.partition("::")
    return (ROOT / path).is_file() and name in functions_of(ROOT / path)


def problems(table: Any) -> list[str]:
    """Everything the table names that does not exist, and every state it claims without showing it."""
    found: list[str] = []
    for row in table.rows():
        options = row.options
        named_fields = {*row.fields, *(field for option in options for field in option.fields)}
        named_verbs = {*row.verbs, *(option.verb for option in options if option.verb)}
        found += [f"{row.capability}: no field {field}" for field in sorted(named_fields) if not field_exists(field)]
        found += [f"{row.capability}: no verb {verb}" for verb in sorted(named_verbs) if not verb_exists(verb)]
        found += [f"{row.capability}: no test {test}" for test in row.tests if not is_a_test(test)]
        found += [f"{row.capability}: no recipe {name}" for name in row.recipes if name not in preset_names()]
        if row.status == "not built":
            found += [f"{row.capability}: not built, yet has tests"] * bool(row.tests)
        else:
            found += [f"{row.capability}: {row.status} without a test"] * (not row.tests)
        if row.status == "built":
            found += [f"{row.capability}: built, yet says why not"] * bool(row.why)
        else:
            found += [f"{row.capability}: {row.status} without a reason"] * (not row.why)
    return found


def missing(table: Any, wanted: Mapping[str, Any]) -> list[str]:
    """Rows and options of the list that the table does not have, and rows that the list does not have."""
    found: list[str] = []
    for section, entries in wanted["rows"].items():
        rows = {row.capability: row for row in table.sections.get(section, ())}
        found += [f"{section}: {name} is not in the list" for name in rows.keys() - {e["title"] for e in entries}]
        for entry in entries:
            row = rows.get(entry["title"])
            if row is None:
                found.append(f"{section}: {entry['title']} is not mapped")
                continue
            if " ".join(row.systems) != entry["systems"]:
                found.append(f"{entry['title']}: systems {row.systems}, not {entry['systems']}")
            found += [f"{row.capability}: {name}" for name in sorted(set(entry.get("options", ())) - options_of(row))]
    return found


def test_every_capability_and_each_of_its_options_is_mapped() -> None:
    assert sum(len(entries) for entries in WANTED["rows"].values()) == 182
    assert missing(TABLE, WANTED) == []
    assert list(TABLE.sections) == list(WANTED["rows"])


def test_every_option_a_program_has_is_mapped_somewhere() -> None:
    mapped = set().union(*(options_of(row) for row in TABLE.rows()))
    mapped |= {f"{option.systems[0]} {spelling}" for option in TABLE.hardware for spelling in option.spellings}
    wanted = {f"{system} {spelling}" for system, spellings in WANTED["options"].items() for spelling in spellings}
    assert len(wanted) == 467
    assert sorted(wanted - mapped) == []


def test_no_option_is_mapped_that_no_program_has() -> None:
    known = {f"{system} {spelling}" for system, spellings in WANTED["options"].items() for spelling in spellings}
    known |= {name for entries in WANTED["rows"].values() for entry in entries for name in entry.get("options", ())}
    assert sorted(name for row in TABLE.rows() for name in options_of(row) - known) == []


def test_every_promise_of_the_old_programs_is_answered() -> None:
    wanted = [(system, promise) for entry in WANTED["promises"] for system, promise in entry.items()]
    assert [(row.systems[0], row.capability) for row in TABLE.promises] == wanted
    assert len(wanted) == 19


def test_every_option_that_only_its_hardware_understands_is_explained() -> None:
    explained = {f"{option.systems[0]} {option.spellings[0]}" for option in TABLE.hardware}
    wanted = {f"{system} {spelling}" for system, spellings in WANTED["hardware"].items() for spelling in spellings}
    assert explained == wanted
    assert len(wanted) == 17


def test_everything_the_table_names_exists_and_every_state_is_shown() -> None:
    assert problems(TABLE) == []


def test_every_plan_is_a_reason_somebody_gives() -> None:
    given = {row.why for row in TABLE.rows()} | {option.not_built for row in TABLE.rows() for option in row.options}
    assert [name for name, plan in TABLE.plans.items() if plan not in given] == []


def test_the_page_is_what_the_table_says() -> None:
    assert tool.main(["--check"]) == 0


def test_a_stale_page_is_noticed_and_made_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "coverage.yaml").write_text((ROOT / "docs/coverage.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    assert tool.main(["--check"], tmp_path) == 1
    assert "run python docs/make_coverage.py" in capsys.readouterr().err
    assert tool.main([], tmp_path) == 0
    assert tool.main(["--check"], tmp_path) == 0


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"fields": ("optimizer.momentun",)}, "no field optimizer.momentun"),
        ({"fields": ("model.options.no_such_option",)}, "no field model.options.no_such_option"),
        ({"fields": ("seed.seed",)}, "no field seed.seed"),
        ({"verbs": ("train --no-such-option",)}, "no verb train --no-such-option"),
        ({"verbs": ("trian",)}, "no verb trian"),
        ({"recipes": ("no-such-recipe",)}, "no recipe no-such-recipe"),
        (
            {"tests": ("tests/test_coverage.py::test_that_is_not_there",)},
            "no test tests/test_coverage.py::test_that_is",
        ),
        ({"tests": ("tests/test_of_nothing.py::test_nothing",)}, "no test tests/test_of_nothing.py::test_nothing"),
        ({"status": "built", "tests": (), "why": ""}, "built without a test"),
        ({"status": "not built", "tests": (), "why": ""}, "not built without a reason"),
    ],
)
def test_a_claim_that_is_not_true_is_noticed(change: dict[str, Any], complaint: str) -> None:
    row = dataclasses.replace(TABLE.promises[0], **change)
    assert complaint in "\n".join(problems(dataclasses.replace(TABLE, promises=(row,))))


def test_a_row_or_an_option_that_is_dropped_is_noticed() -> None:
    section = "5 Schedules"
    rows = TABLE.sections[section]
    without_row = dataclasses.replace(TABLE, sections={**TABLE.sections, section: rows[1:]})
    assert missing(without_row, WANTED) == [f"{section}: {rows[0].capability} is not mapped"]
    bare = dataclasses.replace(rows[0], options=())
    without_options = dataclasses.replace(TABLE, sections={**TABLE.sections, section: (bare, *rows[1:])})
    assert missing(without_options, WANTED) == ["Step by period: PT --lr-gamma", "Step by period: PT --lr-step-size"]


def test_the_table_refuses_a_key_given_twice_and_a_key_it_does_not_know(tmp_path: Path) -> None:
    text = (ROOT / "docs/coverage.yaml").read_text(encoding="utf-8")
    file = tmp_path / "coverage.yaml"
    file.write_text(text.replace("  NV: NVIDIA", "  PT: NVIDIA"), encoding="utf-8")
    with pytest.raises(tool.TableError, match="given twice"):
        tool.read(file)
    file.write_text(text.replace("status: not built", "state: not built", 1), encoding="utf-8")
    with pytest.raises(tool.TableError, match="unknown keys"):
        tool.read(file)


def test_a_value_the_page_tells_people_to_write_is_one_the_recipe_accepts() -> None:
    told = [
        (option.fields[0], option.value)
        for row in TABLE.rows()
        for option in row.options
        if len(option.fields) == 1 and option.value
    ]
    assert len(told) > 50
    assert not value_fits("precision.mode", "fp15")
    assert not value_fits("model.options.version", "v3")
    assert [f"{field}: {value}" for field, value in told if not value_fits(field, value)] == []


def test_a_network_the_page_tells_people_to_name_can_be_built() -> None:
    options = [option for row in TABLE.rows() for option in row.options if option.fields == ("model.name",)]
    named = {option.value for option in options if option.value}
    assert named
    assert sorted(named - set(SPECS)) == []
