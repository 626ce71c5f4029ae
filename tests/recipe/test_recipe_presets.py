from __future__ import annotations

import pytest

from reconv.recipe.load import load
from reconv.recipe.names import preset_names
from reconv.recipe.plan import Facts, make_plan

NUM_TRAIN = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "auto": 1_281_167, "synthetic": 256}


@pytest.mark.parametrize("name", preset_names())
def test_a_preset_is_valid_claims_something_and_can_be_planned(name: str) -> None:
    resolved = load(name)
    recipe, header = resolved.recipe, " ".join(resolved.header.split())
    assert recipe.name == name
    assert recipe.description
    assert all(f"{word}:" in header for word in ("command", "hardware", "expected", "published", "measured by us"))
    assert f"reconv train {name}" in header
    if recipe.expect is not None:
        assert recipe.expect.source
        assert f"{recipe.expect.value:.4f}".rstrip("0") in header, "header and field promise the same"
        figures = [figure.value for figure in (*recipe.published, *recipe.measured)]
        assert figures, "a promise rests on a figure"
    for claim in recipe.published:
        assert claim.value is None or f"{claim.value:.4f}".rstrip("0") in header, "header and field cite the same"
    assert ("measured by us: not" in header) == (not recipe.measured)
    for found in recipe.measured:
        assert all(text in header for text in (found.date, f"n = {found.n}", f"{found.value:.4f}".rstrip("0")))
    plan = make_plan(recipe, Facts(NUM_TRAIN[recipe.data.source], 1000, 10, cores=2))
    assert plan.total_steps > 0


def test_the_resnet50_recipe_is_the_published_one() -> None:
    recipe = load("resnet50").recipe
    plan = make_plan(recipe, Facts(1_281_167, 50_000, 1000, world_size=8, cores=8))
    assert plan.schedule.peak_lr == 2.048
    assert plan.group == plan.batch_per_device == 256
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay) == (0.875, 2**-15)
    assert plan.schedule.warmup_steps == 8 * 625


def test_a_preset_that_extends_another_changes_only_what_it_says() -> None:
    shallow, deep = load("resnet18"), load("resnet152")
    assert deep.recipe.schedule == shallow.recipe.schedule
    assert deep.origins["schedule.lr"].startswith("resnet18.yaml:")
    assert deep.origins["model.name"].startswith("resnet152.yaml:")
    assert load("cifar100-resnet20").recipe.expect is None
