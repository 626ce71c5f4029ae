"""Every field of a schedule is used by its kind, or refused, or left behind with the curve it was about."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from reconv.errors import RecipeError
from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.presets import preset_names
from reconv.recipe.rules import SCHEDULE_FIELDS
from reconv.recipe.schema import Recipe, ScheduleConfig
from reconv.trainer.lr_schedule import learning_rate

NEEDED: dict[str, dict[str, Any]] = {
    "step": {"period": "1ep"},
    "multistep": {"milestones": ["2ep", "5ep"]},
    "piecewise": {"milestones": ["2ep", "5ep"], "milestone_lrs": [0.05, 0.01]},
    "one-cycle": {"warmup": "2ep"},
    "exponential": {"gamma": 0.5},
}
OTHER: dict[str, Any] = {
    "lr": 0.3,
    "base_batch_size": 64,
    "interval": "epoch",
    "warmup": "4ep",
    "warmup_from": "zero",
    "end_lr": 0.01,
    "end_lr_ratio": 0.1,
    "decay_until": "8ep",
    "period": "2ep",
    "num_periods": 3,
    "staircase": True,
    "milestones": ["1ep", "6ep"],
    "milestone_when": "exceeded",
    "milestone_lrs": [0.5, 0.25],
    "warmup_mode": "multiply",
    "gamma": 0.7,
    "power": 3,
    "start_lr_ratio": 0.5,
    "anneal_strategy": "linear",
}


def rates(schedule: dict[str, Any]) -> list[float]:
    recipe = Recipe.model_validate({"length": "10ep", "batch": {"size": 100}, "schedule": schedule})
    plan = make_plan(recipe, Facts(1000, 100, 10))
    return [learning_rate(plan.schedule, step) for step in range(plan.total_steps)]


@pytest.mark.parametrize("kind", SCHEDULE_FIELDS)
def test_a_field_changes_the_rates_of_its_kinds_and_is_refused_by_the_others(kind: str) -> None:
    assert set(ScheduleConfig.model_fields) == {"name", *OTHER}
    plain = {"name": kind, "warmup": "3ep", **NEEDED.get(kind, {})}
    for name, value in OTHER.items():
        if name in SCHEDULE_FIELDS[kind]:
            assert rates(plain | {name: value}) != rates(plain), f"{name} is used"
        else:
            with pytest.raises(ValidationError, match=rf"schedule\.{name}: is for the kind"):
                rates(plain | {name: value})


@pytest.mark.parametrize("name", preset_names())
def test_any_preset_takes_another_curve(name: str) -> None:
    assert load(name, [("schedule.name", "constant", "--set")]).recipe.schedule.name == "constant"


def test_another_curve_leaves_behind_what_was_said_about_the_old_one(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: resnet50-habana-8card-bf16\nschedule: {kind: step, period: 30ep}\n")
    resolved = load(str(child))
    assert resolved.recipe.schedule.milestone_lrs == resolved.recipe.schedule.milestones == ()
    assert resolved.origins["schedule.milestone_lrs"] == "default"
    eight = load("resnext101-habana-8card-bf16").recipe.schedule
    assert (eight.name, eight.milestone_lrs, eight.milestones) == ("step", (), ())


@pytest.mark.parametrize(
    "overrides",
    [
        {"schedule.milestones": "[3ep]"},
        {"schedule.name": "constant", "schedule.milestones": "[3ep]"},
        {"schedule.milestones": "[3ep]", "schedule.name": "linear"},
        {"schedule": "{kind: constant, milestones: [3ep]}"},
    ],
)
def test_what_is_said_beside_or_after_the_kind_is_refused(overrides: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"schedule\.milestones: is for the kinds multistep and piecewise, but"):
        load("resnet50", [(field, value, "--set") for field, value in overrides.items()])


@pytest.mark.parametrize("name", ["resnet50-habana-1card-bf16", "resnet152-habana-1card-bf16"])
def test_a_rate_that_a_table_would_ignore_is_refused(name: str) -> None:
    with pytest.raises(
        RecipeError, match=r"--lr: schedule\.lr: 0\.5 has no effect: .* its rates are schedule\.milestone_lrs"
    ):
        load(name, [("schedule.lr", "0.5", "--lr")])
    assert load("resnet50-habana-8card-bf16", [("schedule.lr", "0.5", "--lr")]).recipe.schedule.lr == 0.5
