"""The setup of a run: shared by training, dry runs and the Python API, and without a run directory if it fails."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from ranks import in_ranks

import reconv
from reconv.core.errors import ReconvError, UsageError
from reconv.recipe import plan as planning
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.trainer import prepare as prepare_run
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.dry_run import dry_run
from reconv.trainer.loop import Trainer
from reconv.trainer.run import TrainingRun

SHORT = [("length", "2step", "test"), ("schedule.warmup", "0step", "test"), ("evaluate.every", "2step", "test")]


@pytest.fixture
def plans(monkeypatch: pytest.MonkeyPatch) -> list[Plan]:
    """Every plan that is made."""
    made: list[Plan] = []

    def counted(recipe: Recipe, facts: Facts, fitted: Sequence[str] = ()) -> Plan:
        made.append(make_plan(recipe, facts, fitted))
        return made[-1]

    monkeypatch.setattr(prepare_run, "make_plan", counted)
    monkeypatch.setattr(planning, "make_plan", counted)
    return made


def test_plan_is_made_once(plans: list[Plan]) -> None:
    reconv.train("quickstart", out="run", overrides=SHORT)
    assert len(plans) == 1
    dry_run("quickstart", steps=1, overrides=SHORT)
    assert len(plans) == 2


class CountHooks(TrainerCallback):
    """Counts the calls of each hook."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.others: list[str] = []

    def on_step_end(self, trainer: Trainer, step: int, *args: object) -> None:
        assert trainer.counters.step == step
        self.steps.append(step)

    def on_evaluate_end(self, trainer: Trainer) -> None:
        self.others.append("evaluate")

    def on_save_start(self, trainer: Trainer) -> None:
        self.others.append("save")

    def on_fit_end(self, trainer: Trainer) -> None:
        self.others.append("end")

    def teardown(self, trainer: Trainer) -> None:
        self.others.append("close")


def test_a_run_can_be_trained_from_python_with_a_callback() -> None:
    hooks = CountHooks()
    with TrainingRun.open("quickstart", SHORT, out="run") as run:
        trainer = run.trainer()
        trainer.callbacks = [*trainer.callbacks, hooks]
        trainer.fit()
    assert run.result.exit_code == 0 and run.result.summary["steps"] == 2
    assert (hooks.steps, hooks.others) == ([0, 1], ["evaluate", "save", "end", "close"])
    with TrainingRun.open("quickstart", SHORT, out="run", resume=True) as again:
        assert again.is_finished
        with pytest.raises(UsageError, match="is finished"):
            again.trainer()
    assert again.result.was_finished and again.result.summary == run.result.summary


@pytest.mark.parametrize(
    "override",
    [
        ("batch.size", "100000", "test"),  # cannot be planned
        ("model.options.padding", "none", "test"),  # cannot be built
        ("profile", [5, 9], "test"),
    ],
)
def test_failed_setup_creates_no_run_directory(override: tuple[str, object, str]) -> None:
    with pytest.raises(ReconvError):
        reconv.train("quickstart", overrides=[*SHORT, override])
    assert list(Path().iterdir()) == []


def steps_on_rank(out: str) -> int:
    with TrainingRun.open("quickstart", [*SHORT, ("batch.group", "16", "test")], out=out) as run:
        run.trainer().fit()
    steps: int = run.result.summary["steps"]
    return steps


def test_all_ranks_have_the_result(tmp_path: Path) -> None:
    assert in_ranks(2, steps_on_rank, str(tmp_path / "run")) == [2, 2]
