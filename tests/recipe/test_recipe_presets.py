from __future__ import annotations

import pytest

from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.presets import preset_names
from reconv.trainer.lr_schedule import learning_rate

NUM_TRAIN = {"digits": 1437, "cifar10": 50_000, "cifar100": 50_000, "auto": 1_281_167, "synthetic": 256}
NUM_TRAIN |= {"scattered-digits": 2000, "voc": 5011}


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


@pytest.mark.parametrize(
    ("name", "devices", "steps_per_epoch", "total", "peak"),
    [("ssd-resnet34", 1, 917, 58_688, 0.012), ("ssd-resnet34-habana-8card-bf16", 8, 115, 7_360, 0.096)],
)
def test_the_ssd_recipes_are_the_published_ones(
    name: str, devices: int, steps_per_epoch: int, total: int, peak: float
) -> None:
    recipe = load(name).recipe
    plan = make_plan(recipe, Facts(117_266, 5000, 80, world_size=devices, cores=8))
    assert (plan.steps_per_epoch, plan.total_steps, plan.schedule.peak_lr) == (steps_per_epoch, total, peak)
    assert plan.group == plan.batch_per_device == 128
    assert any(f"{total:,} steps" in line for line in plan.lines)
    assert plan.schedule.warmup_steps == 5 * steps_per_epoch
    assert (recipe.optimizer.momentum, recipe.optimizer.weight_decay, recipe.optimizer.weight_decay_exclude) == (
        0.9,
        5e-4,
        "all",
    )
    rates = [learning_rate(plan.schedule, epoch * steps_per_epoch) for epoch in (0, 5, 39, 40, 50, 63)]
    assert rates == pytest.approx([0, peak, peak, peak / 10, peak / 100, peak / 100])
