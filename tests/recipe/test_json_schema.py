"""The JSON Schema for editors: it accepts every preset and finds what the loader would refuse."""

from __future__ import annotations

from typing import Any

import jsonschema
import pytest

from reconv.recipe.json_schema import recipe_json_schema
from reconv.recipe.load.document import read, read_file
from reconv.recipe.presets import preset_names, preset_path

VALIDATOR = jsonschema.Draft202012Validator(recipe_json_schema())


def problems(tree: Any) -> list[str]:
    return [f"{error.json_path}: {error.message}" for error in VALIDATOR.iter_errors(tree)]


def test_it_is_a_schema_and_accepts_every_preset() -> None:
    jsonschema.Draft202012Validator.check_schema(recipe_json_schema())
    names = preset_names()
    assert len(names) > 90
    assert {name: found for name in names if (found := problems(read(read_file(preset_path(name))).tree))} == {}


@pytest.mark.parametrize(
    "tree",
    [
        {"schedule": {"lr": "2^-3", "milestone_lrs": ["2^-3", 0.1]}},
        {"precision": {"mode": 16.16}},
        {"metrics": ["my_pkg:F1", {"name": "my_pkg:F1", "options": {"beta": 2}}]},
        {"loggers": "csv,tensorboard"},
        {"data": {"bad_images": "skip up to 3"}, "save": {"every": "15min"}},
        {"expect": None, "batch": {"group": "all"}},
    ],
)
def test_it_accepts_every_way_to_write_a_value(tree: dict[str, Any]) -> None:
    assert problems(tree) == []


@pytest.mark.parametrize(
    "tree",
    [
        {"batch": {"sise": 3}},
        {"batch": {"size": 0}},
        {"length": "90"},
        {"optimizer": {"name": "sdg"}},
        {"schedule": {"lrr": 0.1}},
        {"data": {"bad_images": "skip"}},
        {"optimiser": {}},
    ],
)
def test_it_finds_what_is_wrong(tree: dict[str, Any]) -> None:
    assert len(problems(tree)) == 1
