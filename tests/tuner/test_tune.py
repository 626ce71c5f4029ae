"""Studies whose trials are trained: decisions, failures, stops, fresh seeds, and the recipe to keep."""

from __future__ import annotations

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from trials_here import SMALL, SPACE, TrialsHere, options, run_here

from reconv.core.errors import (
    DataError,
    DivergedError,
    PreemptedError,
    RecipeError,
    ResourceError,
    RunLockedError,
    UsageError,
)
from reconv.logging.run_dir import RunDir, read_summary
from reconv.recipe.loader import load
from reconv.recipe.schema import flatten
from reconv.tuner.launch import TrialCommand, TrialJob, make_launcher
from reconv.tuner.result import Confirmation, TuneResult
from reconv.tuner.study import JOURNAL, locked_folder


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> TuneResult:
    """A study that was run without a pause, with fresh seeds."""
    return run_here(options(tmp_path_factory.mktemp("study") / "study", confirm=2))


def seen(result: TuneResult) -> Any:
    """A result without its folder."""
    content = result.to_dict()
    return {name: value for name, value in content.items() if name not in ("folder", "recipe_file", "report")}


def test_trials_are_runs_of_their_final_length_that_are_stopped_and_continued_at_rungs(study: TuneResult) -> None:
    ended = [t for t in study.trials if t.state == "complete"]
    assert [t.number for t in study.trials] == list(range(4))
    assert {t.state for t in study.trials} == {"complete", "pruned"}
    assert study.trials[0] in ended and len(ended) >= 2
    for trial in study.trials:
        summary = read_summary(study.folder / str(trial.number))
        whole = trial.state == "complete"
        assert summary["total_steps"] == 16
        assert (summary["steps"], summary["epochs"], study.costs[trial.number]) == ((16, 4, 4) if whole else (8, 2, 2))
        assert summary["value"] == study.value_of(trial)
        assert load(str(study.folder / str(trial.number) / "recipe.yaml")).recipe.schedule.lr == trial.values.get(
            "schedule.lr", 0.1
        )


def test_a_study_that_is_stopped_again_and_again_ends_with_the_same_trials_values_and_best(
    study: TuneResult, tmp_path: Path
) -> None:
    out, num_starts = tmp_path / "study", 0

    def stop(job: TrialJob) -> None:
        os.kill(os.getpid(), signal.SIGINT if num_starts % 2 else signal.SIGTERM)

    while True:
        num_starts += 1
        launcher = TrialsHere(before=stop if num_starts < 8 else lambda job: None)
        try:
            result = run_here(options(out, confirm=2), launcher)
            break
        except PreemptedError as error:
            assert (launcher.stopped, len(launcher.jobs)) == (1, 1)
            assert "the same command continues it" in error.hint
    assert num_starts == 8
    assert seen(result) == seen(study)
    again = TrialsHere()
    assert seen(run_here(options(out, confirm=2), again)) == seen(study)
    assert again.jobs == []


def test_more_trials_at_once_are_the_same_trials(study: TuneResult, tmp_path: Path) -> None:
    result = run_here(options(tmp_path / "study", parallel=3))
    assert result.trials == study.trials


def test_more_trials_continue_the_study(study: TuneResult, tmp_path: Path) -> None:
    first = run_here(options(tmp_path / "study", trials=3))
    launcher = TrialsHere()
    more = run_here(options(tmp_path / "study"), launcher)
    assert more.trials == study.trials
    assert more.trials[:3] == first.trials
    assert not {str(job.run.name) for job in launcher.jobs} & {"0", "1", "2"}


def test_the_recipe_to_keep_is_one_that_train_takes_and_gives_the_values_of_its_trial(study: TuneResult) -> None:
    kept = study.trials[study.kept]
    recipe = load(str(study.recipe_file)).recipe
    trained = load(str(study.folder / str(kept.number) / "recipe.yaml")).recipe
    ignored = ("name", "description", "expect", "measured", "published", "save.", "engine.divergence.", "data.path")
    ours, theirs = flatten(recipe), flatten(trained)
    assert [n for n in theirs if ours.get(n) != theirs[n] and not n.startswith(ignored)] == []
    assert study.verdict in study.recipe_file.read_text()
    assert json.loads((study.folder / "study.json").read_text()) == study.to_dict()


def test_fresh_seeds_compare_the_best_trial_with_the_recipe_as_it_is(study: TuneResult) -> None:
    confirmed = study.confirmation
    assert study.best != 0
    assert confirmed is not None
    assert confirmed.seeds == (1, 2)
    runs = {path.name: read_summary(path) for path in (study.folder / "confirm").iterdir()}
    assert sorted(runs) == sorted(f"trial-{n}-seed-{s}" for n in (0, study.best) for s in (1, 2))
    assert confirmed.default == tuple(runs[f"trial-0-seed-{seed}"]["value"] for seed in (1, 2))
    assert all(summary["steps"] == 16 for summary in runs.values())


@pytest.mark.parametrize(
    ("default", "best", "is_better"),
    [
        ((0.90, 0.91, 0.92), (0.95, 0.96, 0.97), True),
        ((0.90, 0.91, 0.92), (0.91, 0.92, 0.93), False),  # 1 point, standard error 0.8
        ((0.90, 0.90, 0.90), (0.90, 0.90, 0.90), False),
        ((0.90, 0.91, 0.92), (0.85, 0.86, 0.87), False),
        ((0.90, 0.91, 0.92), (0.99, 0.99), False),  # the third has failed
        ((0.90, 0.91), (0.95, 0.96, 0.97), True),  # one of the default has
    ],
)
def test_the_default_stands_unless_the_best_is_better_by_two_standard_errors(
    default: tuple[float, ...], best: tuple[float, ...], is_better: bool
) -> None:
    confirmed = Confirmation(default, best, (1, 2, 3))
    assert confirmed.is_better is is_better
    lower = Confirmation(tuple(1 - v for v in default), tuple(1 - v for v in best), (1, 2, 3), lower_is_better=True)
    assert lower.is_better is is_better


def test_a_trial_that_fails_is_recorded_with_its_reason_and_the_study_goes_on(tmp_path: Path) -> None:
    def fail(job: TrialJob) -> None:
        if job.run.name == "1":
            raise DivergedError("step 7: the loss is not finite")
        if job.run.name == "2" and job.stop_at is None:
            raise ResourceError("Out of memory")
        if job.run.name == "3":
            raise ResourceError("Out of memory")

    result = run_here(options(tmp_path / "study"), TrialsHere(before=fail))
    failures = {t.number: t.failure for t in result.trials if t.failure}
    assert failures[1] == "exit code 5: step 7: the loss is not finite"
    assert failures[3] == "exit code 6: Out of memory"
    assert result.trials[0].state == "complete"
    assert {t.state for t in result.trials if t.failure} == {"failed"}
    again = TrialsHere()
    assert run_here(options(tmp_path / "study"), again).trials == result.trials
    assert again.jobs == []
    assert "exit code 6" in result.report.read_text()


def test_a_combination_that_the_recipe_refuses_is_a_failed_trial_that_is_never_started(tmp_path: Path) -> None:
    space = ("optimizer.momentum=0|0.9", "optimizer.nesterov=true|false")  # Nesterov needs momentum
    launcher = TrialsHere()
    result = run_here(options(tmp_path / "study", space=space, trials=6, search="random"), launcher)
    refused = {t.number for t in result.trials if "nesterov" in t.failure}
    assert refused
    assert not {int(job.run.name) for job in launcher.jobs} & refused


def test_a_study_of_which_every_trial_fails_ends_with_the_first_reason(tmp_path: Path) -> None:
    def fail(job: TrialJob) -> None:
        raise DataError("no images")

    with pytest.raises(ResourceError, match="all of 3 trials have failed") as caught:
        run_here(options(tmp_path / "study"), TrialsHere(before=fail))
    assert caught.value.why == "exit code 3: no images"


def test_mistakes_are_found_before_any_trial_and_leave_no_folder(tmp_path: Path) -> None:
    out = tmp_path / "study"
    with pytest.raises(RecipeError, match=r"did you mean schedule\.lr"):
        run_here(options(out, space=("schedule.lrr=1:2",)))
    with pytest.raises(DataError, match="the dataset does not exist"):
        run_here(options(out, recipe="finetune", overrides=(), space=(), data="/nowhere/photos"))
    with pytest.raises(UsageError, match="without evaluations"):
        run_here(options(out, overrides=(("evaluate.every", "off", "--set"),)))
    with pytest.raises(UsageError, match="without checkpoints"):
        run_here(options(out, overrides=(("save.every", "off", "--set"),)))
    with pytest.raises(UsageError, match="one seed says nothing"):
        run_here(options(out, confirm=1))
    with pytest.raises(UsageError, match="cannot be combined with tune"):
        make_launcher(TrialCommand(recipe="quickstart", overrides=()), "kubernetes", {})
    assert not out.exists()


def test_another_recipe_other_options_and_a_study_in_use_are_refused(study: TuneResult) -> None:
    for change in (
        {"recipe": "cifar10-resnet20", "data": None},
        {"overrides": (*SMALL, ("batch.size", 32, "--batch-size"))},
        {"space": SPACE[:1]},
    ):
        with pytest.raises((UsageError, DataError), match=r"another study|needs a dataset"):
            run_here(options(study.folder, **change))
    with locked_folder(study.folder), pytest.raises(RunLockedError, match="the study is in use"):
        run_here(options(study.folder))
    run = study.folder / "0"
    with pytest.raises(UsageError, match="contains a run"):
        run_here(options(run))
    assert not (run / JOURNAL).exists()
    assert RunDir(run).is_run()


@pytest.mark.parametrize("run", ["1", "confirm/trial-0-seed-1"])
def test_runs_that_are_not_of_the_study_are_not_taken_for_its_trials(
    study: TuneResult, tmp_path: Path, run: str
) -> None:
    shutil.copytree(study.folder / "0", tmp_path / run)
    with pytest.raises(UsageError, match=f"has no study, but the run {run}"):
        run_here(options(tmp_path))
    assert not (tmp_path / JOURNAL).exists()
