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
        (["optimizer.nesterov=true", "optimizer.name=rmsprop"], "optimizer.nesterov"),
        (["optimizer.alpha=0.95"], "optimizer.alpha"),
        (["optimizer.alpha_exponent=-14", "optimizer.name=lars"], "optimizer.alpha_exponent"),
        (
            ["optimizer.alpha_exponent=-14", "optimizer.alpha=0.95", "optimizer.name=rmsprop"],
            "optimizer.alpha_exponent",
        ),
        (["optimizer.eps=0.1"], "optimizer.eps"),
        (["optimizer.trust_coefficient=0.1"], "optimizer.trust_coefficient"),
        (["optimizer.lars_exclude=none", "optimizer.name=rmsprop-tf"], "optimizer.lars_exclude"),
        (["optimizer.implementation=fused", "optimizer.name=rmsprop"], "optimizer.implementation"),
        (["optimizer.weight_decay_exclude=norm", "optimizer.name=lars"], "optimizer.weight_decay_exclude"),
        (["checkpoint_average.last=5ep", "save.every=off"], "checkpoint_average.last"),
        (["checkpoint_average.last=5ep", "save.every=10min"], "checkpoint_average.last"),
        (["checkpoint_average.last=5min"], "checkpoint_average.last"),
        (["checkpoint_average.last=0ep"], "checkpoint_average.last"),
        (["early_stopping.target=0.9", "evaluate.every=off"], "early_stopping.target"),
        (["early_stopping.patience=3", "evaluate.every=off"], "early_stopping.patience"),
        (["early_stopping.target=75.9"], "early_stopping.target"),
        (["early_stopping.patience=0"], "early_stopping.patience"),
        (["loss.smooth_over=some"], "loss.smooth_over"),
        (["optimizer.name=adam"], "optimizer.name"),
    ],
)
def test_settings_that_cannot_both_be_meant_are_refused_by_name(recipe: str, settings: list[str], field: str) -> None:
    with pytest.raises(RecipeError) as refusal:
        load(recipe, given(*settings))
    assert field in str(refusal.value)


@pytest.mark.parametrize(
    "settings",
    [
        [
            "optimizer.name=lars",
            "optimizer.weight_decay_exclude=norm-bias",
        ],  # what lars does by default, said twice
        [
            "optimizer.name=lars",
            "optimizer.lars_exclude=norm",
            "optimizer.weight_decay_exclude=norm",
            "optimizer.nesterov=true",
        ],
        ["optimizer.name=rmsprop-tf", "optimizer.eps=0.01", "optimizer.alpha=0.95"],
        ["optimizer.weight_decay_exclude=nvidia-by-name", "optimizer.implementation=foreach"],
        [
            "checkpoint_average.last=off",
            "early_stopping.target=off",
            "early_stopping.patience=off",
            "save.every=off",
            "evaluate.every=off",
        ],
    ],
)
def test_settings_that_agree_are_taken(recipe: str, settings: list[str]) -> None:
    origins = load(recipe, given(*settings)).origins
    assert all(origins[setting.split("=")[0]] == "--set" for setting in settings)


def test_alpha_falls_with_the_batch_when_given_as_an_exponent(recipe: str) -> None:
    settings = ["optimizer.name=rmsprop-tf", "optimizer.alpha_exponent=-14"]
    plan = make_plan(load(recipe, given(*settings)).recipe, FACTS)
    assert plan.alpha == 1 - 768 / 16384 == 0.953125
    assert "rmsprop-tf: alpha 1 - 768 x 2^-14 = 0.953125" in plan.lines
    with pytest.raises(RecipeError, match="an exponent of -10 or less"):
        make_plan(load(recipe, given(*settings[:1], "optimizer.alpha_exponent=-9")).recipe, FACTS)


def test_epsilon_left_open_is_the_vendors_default_of_the_kind(recipe: str) -> None:
    kinds = ("sgd", "lars", "rmsprop", "rmsprop-tf")
    found = {kind: load(recipe, given(f"optimizer.name={kind}")).recipe.optimizer.effective_eps for kind in kinds}
    assert found == {"sgd": 0.0, "lars": 0.0, "rmsprop": 1e-3, "rmsprop-tf": 1e-3}


def test_the_window_of_an_average_holds_the_regular_checkpoints_of_the_last_epochs(recipe: str) -> None:
    plan = make_plan(
        load(recipe, given("checkpoint_average.last=2ep", "save.every=50step", "length=4ep")).recipe, FACTS
    )
    window = plan.average
    assert window is not None and plan.total_steps == 400
    assert [step for step in range(401) if window.holds(step, 400)] == [250, 300, 350, 400]
    assert [step for step in range(401) if window.holds(step, 130)] == [50, 100, 130]  # ended early: the last counts
    assert "at the end the mean of the checkpoints of the last 200 steps" in plan.lines


def test_the_plan_says_when_a_run_may_end_early(recipe: str) -> None:
    plan = make_plan(load(recipe, given("early_stopping.target=0.759", "early_stopping.patience=5")).recipe, FACTS)
    assert "ends early when 0.759 is reached or 5 evaluations in a row are no better" in plan.lines
