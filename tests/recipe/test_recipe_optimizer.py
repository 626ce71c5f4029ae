"""Fields of optimizer, loss, average and stop that contradict each other, and what the plan derives from them."""

from __future__ import annotations

from pathlib import Path

import pytest

from reconv.errors import RecipeError
from reconv.recipe.loader import load
from reconv.recipe.plan import Facts, make_plan

FACTS = Facts(num_train=76_800, num_val=10, num_classes=10)


def given(*settings: str) -> list[tuple[str, object, str]]:
    return [(s.split("=", 1)[0], s.split("=", 1)[1], "--set") for s in settings]


@pytest.fixture
def recipe(tmp_path: Path) -> str:
    file = tmp_path / "mine.yaml"
    file.write_text("length: 5ep\nbatch: {size: 768}\n")
    return str(file)


@pytest.mark.parametrize(
    ("settings", "field"),
    [
        (["optimizer.nesterov=true", "optimizer.momentum=0"], "optimizer.nesterov"),
        (["optimizer.nesterov=true", "optimizer.kind=rmsprop"], "optimizer.nesterov"),
        (["optimizer.alpha=0.95"], "optimizer.alpha"),
        (["optimizer.alpha_exponent=-14", "optimizer.kind=lars"], "optimizer.alpha_exponent"),
        (
            ["optimizer.alpha_exponent=-14", "optimizer.alpha=0.95", "optimizer.kind=rmsprop"],
            "optimizer.alpha_exponent",
        ),
        (["optimizer.epsilon=0.1"], "optimizer.epsilon"),
        (["optimizer.trust=0.1"], "optimizer.trust"),
        (["optimizer.skip=none", "optimizer.kind=rmsprop-tf"], "optimizer.skip"),
        (["optimizer.path=fused", "optimizer.kind=rmsprop"], "optimizer.path"),
        (["optimizer.decay=not-norm", "optimizer.kind=lars"], "optimizer.decay"),
        (["average.last=5ep", "save.every=off"], "average.last"),
        (["average.last=5ep", "save.every=10min"], "average.last"),
        (["average.last=5min"], "average.last"),
        (["average.last=0ep"], "average.last"),
        (["stop.target=0.9", "evaluate.every=off"], "stop.target"),
        (["stop.patience=3", "evaluate.every=off"], "stop.patience"),
        (["stop.target=75.9"], "stop.target"),
        (["stop.patience=0"], "stop.patience"),
        (["loss.smoothing_form=some"], "loss.smoothing_form"),
        (["optimizer.kind=adam"], "optimizer.kind"),
    ],
)
def test_settings_that_cannot_both_be_meant_are_refused_by_name(recipe: str, settings: list[str], field: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        load(recipe, given(*settings))
    assert field in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        ["optimizer.kind=lars", "optimizer.decay=not-norm-bias"],  # what lars does by default, said twice
        ["optimizer.kind=lars", "optimizer.skip=norm", "optimizer.decay=not-norm", "optimizer.nesterov=true"],
        ["optimizer.kind=rmsprop-tf", "optimizer.epsilon=0.01", "optimizer.alpha=0.95"],
        ["optimizer.decay=nvidia-by-name", "optimizer.path=foreach"],
        ["average.last=off", "stop.target=off", "stop.patience=off", "save.every=off", "evaluate.every=off"],
    ],
)
def test_settings_that_agree_are_taken(recipe: str, settings: list[str]) -> None:
    origins = load(recipe, given(*settings)).origins
    assert all(origins[setting.split("=")[0]] == "--set" for setting in settings)


def test_alpha_falls_with_the_batch_when_given_as_an_exponent(recipe: str) -> None:
    settings = ["optimizer.kind=rmsprop-tf", "optimizer.alpha_exponent=-14"]
    plan = make_plan(load(recipe, given(*settings)).recipe, FACTS)
    assert plan.alpha == 1 - 768 / 16384 == 0.953125
    assert "rmsprop-tf: alpha 1 - 768 x 2^-14 = 0.953125" in plan.lines
    with pytest.raises(RecipeError, match="an exponent of -10 or less"):
        make_plan(load(recipe, given(*settings[:1], "optimizer.alpha_exponent=-9")).recipe, FACTS)


def test_epsilon_left_open_is_the_vendors_default_of_the_kind(recipe: str) -> None:
    kinds = ("sgd", "lars", "rmsprop", "rmsprop-tf")
    found = {kind: load(recipe, given(f"optimizer.kind={kind}")).recipe.optimizer.used_epsilon for kind in kinds}
    assert found == {"sgd": 0.0, "lars": 0.0, "rmsprop": 1e-3, "rmsprop-tf": 1e-3}


def test_the_window_of_an_average_holds_the_regular_checkpoints_of_the_last_epochs(recipe: str) -> None:
    plan = make_plan(load(recipe, given("average.last=2ep", "save.every=50step", "length=4ep")).recipe, FACTS)
    window = plan.average
    assert window is not None and plan.total_steps == 400
    assert [step for step in range(401) if window.holds(step, 400)] == [250, 300, 350, 400]
    assert [step for step in range(401) if window.holds(step, 130)] == [50, 100, 130]  # ended early: the last counts
    assert "at the end the mean of the checkpoints of the last 200 steps" in plan.lines


def test_the_plan_says_when_a_run_may_end_early(recipe: str) -> None:
    plan = make_plan(load(recipe, given("stop.target=0.759", "stop.patience=5")).recipe, FACTS)
    assert "ends early when 0.759 is reached or 5 evaluations in a row are no better" in plan.lines
