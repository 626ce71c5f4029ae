from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reconv.core.errors import RecipeError
from reconv.recipe.load import document
from reconv.recipe.load.identity import differences
from reconv.recipe.loader import dump, load
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe, flatten, schema_fields

NAMES = sorted(schema_fields())
WORDS = ["off", "on", "auto", "all", "micro", "step", "cosine", "multistep", "fp16", "digits", "gpipe", "top1"]
DURATIONS = ["1ep", "0.5ep", "7step", "10%", "3min", "0ep", "1e3ep", "90"]
SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-3, 300)
    | st.integers()
    | st.floats()
    | st.text(max_size=6)
    | st.sampled_from([*WORDS, *DURATIONS])
)
VALUES = SCALARS | st.lists(SCALARS, max_size=3) | st.dictionaries(st.text(max_size=5), SCALARS, max_size=2)
SETTINGS = st.lists(st.tuples(st.sampled_from(NAMES) | st.text(max_size=8), VALUES), max_size=6)


@pytest.fixture(scope="module")
def recipe_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz") / "fuzz.yaml"


def load_or_refuse(path: Path, overrides: list[tuple[str, Any, str]]) -> Recipe | None:
    """A recipe with an origin for each leaf, or None after an error that a person can read."""
    try:
        resolved = load(str(path), overrides)
    except RecipeError as error:
        assert str(error)
        return None
    assert set(resolved.origins) == set(flatten(resolved.recipe))
    return resolved.recipe


@settings(max_examples=150, deadline=None)
@given(SETTINGS)
def test_any_overrides_give_a_recipe_or_a_recipe_error(recipe_file: Path, settings_: list[tuple[str, Any]]) -> None:
    recipe_file.write_text("seed: 1\n")
    recipe = load_or_refuse(recipe_file, [(name, value, "--set") for name, value in settings_])
    if recipe is not None:
        recipe_file.write_text(dump(recipe))
        again = load(str(recipe_file)).recipe
        assert differences(recipe, again) == {}
        assert again == recipe


@settings(max_examples=150, deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES) | st.text(max_size=6), VALUES, max_size=6))
def test_any_tree_of_values_gives_a_recipe_or_a_recipe_error(recipe_file: Path, flat: dict[str, Any]) -> None:
    tree: dict[str, Any] = {}
    for name, value in flat.items():
        node = tree
        *sections, leaf = name.split(".")
        for section in sections:
            node = node[section] if isinstance(node.get(section), dict) else node.setdefault(section + "_", {})
        node[leaf] = value
    recipe_file.write_text(document.write(tree), encoding="utf-8")
    load_or_refuse(recipe_file, [])


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=60) | st.text(alphabet="abel:{}[]- \n\t#&*!|>'\"%@1.e", max_size=60).map(str.encode))
def test_any_bytes_give_a_recipe_or_a_recipe_error(recipe_file: Path, content: bytes) -> None:
    recipe_file.write_bytes(content)
    load_or_refuse(recipe_file, [])


PLANNED = {
    "batch.size": st.integers(1, 300),
    "batch.group": st.integers(1, 300) | st.sampled_from(["all", "micro"]),
    "batch.micro": st.integers(1, 300) | st.just("auto"),
    "data.drop_last": st.booleans(),
    "length": st.sampled_from(["3ep", "0.3ep", "50step"]),
    "schedule.name": st.sampled_from(["cosine", "exponential", "constant"]),
    "schedule.warmup": st.sampled_from(["1ep", "10%", "0step", "60step"]),
    "schedule.base_batch_size": st.none() | st.integers(1, 300),
    "evaluate.every": st.sampled_from(["1ep", "off", "0.1ep", "33%"]),
    "evaluate.offset": st.sampled_from(["0ep", "1ep", "7step"]),
    "save.every": st.sampled_from(["off", "2min", "10step"]),
}


@settings(max_examples=150, deadline=None)
@given(st.fixed_dictionaries({}, optional=PLANNED), st.integers(0, 1000), st.integers(1, 5))
def test_any_valid_recipe_has_a_plan_or_a_recipe_error(
    recipe_file: Path, chosen: dict[str, Any], num_train: int, world_size: int
) -> None:
    recipe_file.write_text("seed: 1\n")
    recipe = load_or_refuse(recipe_file, [(name, value, "--set") for name, value in chosen.items()])
    if recipe is None:
        return
    try:
        plan = make_plan(recipe, Facts(num_train, 10, 10, world_size=world_size))
    except RecipeError as error:
        assert error.hint, "a refusal names what would fit"
        return
    assert plan.total_steps >= 1
    assert all(plan.lines)
