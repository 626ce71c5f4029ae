"""Every field has a description, and every field of a schedule is used, rejected or dropped with the old schedule."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from reconv.core.errors import RecipeError
from reconv.recipe.loader import load
from reconv.recipe.parts.result import MeasuredResult, PublishedResult
from reconv.recipe.parts.schedule import SCHEDULES, ScheduleConfig, learning_rate
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe, schema_fields, section_type
from reconv.recipe.units import Section

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
    "warmup_shape": "constant",
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


def sections(section: type[Section]) -> Iterator[type[Section]]:
    yield section
    for info in section.model_fields.values():
        inner = section_type(info.annotation)
        if inner is not None:
            yield from sections(inner)


def test_every_field_has_a_description() -> None:
    found = [*sections(Recipe), PublishedResult, MeasuredResult]
    assert len(found) > 25 and len(schema_fields()) > 190
    for section in found:
        assert section.__doc__ and section.__doc__.strip() != (Section.__doc__ or "").strip(), section
        for name, info in section.model_fields.items():
            if section_type(info.annotation) is None:
                text = info.description or ""
                assert len(text.split()) >= 1 and text.endswith("."), f"{section.__name__}.{name}"


def rates(schedule: dict[str, Any]) -> list[float]:
    recipe = Recipe.model_validate({"length": "10ep", "batch": {"size": 100}, "schedule": schedule})
    plan = make_plan(recipe, Facts(1000, 100, 10))
    return [learning_rate(plan.schedule, step) for step in range(plan.total_steps)]


def test_every_schedule_of_the_section_has_a_class() -> None:
    assert set(SCHEDULES) == set(get_args(ScheduleConfig.model_fields["name"].annotation))


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_field_changes_the_rates_of_its_schedules_and_is_rejected_by_the_others(name: str) -> None:
    assert set(ScheduleConfig.model_fields) == {"name", *OTHER}
    plain = {"name": name, "warmup": "3ep", **NEEDED.get(name, {})}
    for field, value in OTHER.items():
        if field in SCHEDULES[name].fields:
            assert rates(plain | {field: value}) != rates(plain), f"{field} is used"
        else:
            with pytest.raises(ValidationError, match=rf"schedule\.{field}: is for "):
                rates(plain | {field: value})


def test_another_schedule_drops_the_fields_of_the_old_one(tmp_path: Path) -> None:
    child = tmp_path / "child.yaml"
    child.write_text("extends: resnet50-habana-8card-bf16\nschedule: {name: step, period: 30ep}\n")
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
        {"schedule": "{name: constant, milestones: [3ep]}"},
    ],
)
def test_a_field_given_together_with_another_schedule_is_rejected(overrides: dict[str, str]) -> None:
    with pytest.raises(RecipeError, match=r"schedule\.milestones: is for multistep and piecewise"):
        load("resnet50", [(field, value, "--set") for field, value in overrides.items()])


def test_a_rate_that_a_piecewise_schedule_ignores_is_rejected() -> None:
    with pytest.raises(RecipeError, match=r"--lr: schedule\.lr: 0\.5 has no effect"):
        load("resnet50-habana-1card-bf16", [("schedule.lr", "0.5", "--lr")])
    assert load("resnet50-habana-8card-bf16", [("schedule.lr", "0.5", "--lr")]).recipe.schedule.lr == 0.5


def test_the_default_detector_is_the_published_one() -> None:
    section = Recipe().detection
    assert [round(300 * scale) for scale in section.anchors.scales] == [21, 45, 99, 153, 207, 261, 315]
    assert section.anchors.per_cell == (4, 6, 6, 6, 4, 4)
    assert (section.anchors.variances, section.match_iou, section.negative_ratio) == ((0.1, 0.2), 0.5, 3)
    assert (section.score_threshold, section.nms_iou) == (0.05, 0.5)
    assert (section.topk_candidates, section.detections_per_image) == (200, 200)


def test_eps_left_at_auto_is_the_vendors_default() -> None:
    found = {name: Recipe(optimizer={"name": name}).optimizer.effective_eps for name in ("sgd", "lars", "rmsprop")}  # type: ignore[arg-type]
    assert found == {"sgd": 0.0, "lars": 0.0, "rmsprop": 1e-3}


def test_a_recipe_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        Recipe().seed = 3  # type: ignore[misc]
