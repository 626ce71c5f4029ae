"""Law 1: a run that is stopped anywhere and resumed equals the uninterrupted run, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from ranks import in_ranks, start

import reconv
from reconv.core.errors import CheckpointError, PreemptedError, RecipeError
from reconv.logging.event_log import read_events
from reconv.logging.events import AttemptStarted, CheckpointSaved, EvalFinished, Event, LogMessage, TrainProgress
from reconv.recipe.loader import load

from .conftest import EVERYTHING, Outcome, Train

# A background save may end, and be logged, any number of steps later.
SAVES_AT_ONCE = {**EVERYTHING, "save.background": "false"}


def assert_same_bits(one: Outcome, other: Outcome) -> None:
    a, b = one.bits(), other.bits()
    assert a.keys() == b.keys()
    assert len(a) > 60  # model, average and momentum of every layer
    different = [name for name in a if not torch.equal(a[name], b[name])]
    assert different == []
    assert one.checkpoint.name == other.checkpoint.name


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    """The uninterrupted run."""
    given = [(field, value, "--set") for field, value in EVERYTHING.items()]
    result = reconv.train("quickstart", out=tmp_path_factory.mktemp("uninterrupted") / "whole", overrides=given)
    return Outcome(result.folder, result.summary)


@pytest.mark.parametrize("stop_at", [1, 3, 5, 6, 9])
def test_stop_at_any_step_and_resume_equals_uninterrupted_run(
    train: Train, whole: Outcome, tmp_path: Path, stop_at: int
) -> None:
    given = [(field, value, "--set") for field, value in EVERYTHING.items()]

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        reconv.train(
            "quickstart", out=tmp_path / "parts", overrides=[*given, ("log.every", "1step", "--set")], on_event=stop
        )
    resumed = train("parts", {**EVERYTHING, "log.every": "1step"}, resume=True)
    assert_same_bits(whole, resumed)
    attempts = [e for e in read_events(resumed.folder.events) if isinstance(e, AttemptStarted)]
    assert [a.from_step for a in attempts] == [0, stop_at]


def test_resume_with_other_workers_equals_uninterrupted_run(train: Train, whole: Outcome, tmp_path: Path) -> None:

    def stop(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    given = [(field, value, "--set") for field, value in SAVES_AT_ONCE.items()]
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    resumed = train("parts", {**EVERYTHING, "data.num_workers": "2", "data.prefetch": "4"}, resume=True)
    assert_same_bits(whole, resumed)


def _resume(out: str, settings: dict[str, str]) -> None:
    reconv.train("quickstart", out=out, resume=True, overrides=[(f, v, "--set") for f, v in settings.items()])


@pytest.mark.parametrize(("num_kills", "length"), [(4, "50step"), pytest.param(12, "200step", marks=pytest.mark.slow)])
def test_run_killed_at_random_moments_equals_uninterrupted_run(
    train: Train, tmp_path: Path, num_kills: int, length: str
) -> None:
    """Real processes, killed at random moments of start, steps, evaluation and saves; the last one may finish."""
    settings = {**EVERYTHING, "length": length, "data.subset_percent": "50", "save.every": "2step"}
    whole = train("whole", settings)
    rng = random.Random(0)
    out = tmp_path / "killed"
    resumed_from, during_a_save = set(), 0
    for number in range(num_kills):
        [(process, _)] = start(1, _resume, str(out), settings)
        _wait_for_a_moment(out, process.pid, ("at the start", "after a save", "in a save")[number % 3], rng)
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL
        resumed_from.add(_newest_step(out))
        during_a_save += any((out / "checkpoints").glob(".tmp*"))
    in_ranks(1, _resume, str(out), settings)
    assert len(resumed_from) > num_kills // 3, f"the kills hit too few places: {resumed_from}"
    assert during_a_save > 0
    result = reconv.train("quickstart", out=out, resume=True, overrides=[(f, v, "--set") for f, v in settings.items()])
    assert_same_bits(whole, Outcome(result.folder, result.summary))


def _newest_step(out: Path) -> str:
    return max((path.name for path in (out / "checkpoints").glob("step-*")), default="none")


def _wait_for_a_moment(out: Path, pid: int, kind: str, rng: random.Random) -> None:
    """Wait for the run's progress, not only for a time, so that the load of the machine does not matter."""
    before = _newest_step(out)
    if kind != "at the start":
        _wait_until(lambda: _newest_step(out) != before)
    if kind == "in a save":
        _wait_until(lambda: _is_stopped_in_a_save(out, pid))
    else:
        time.sleep(rng.uniform(0, 0.2))


def _is_stopped_in_a_save(out: Path, pid: int) -> bool:
    """Whether the process could be stopped while it saves; saves may take less time than a signal."""
    if not any((out / "checkpoints").glob(".tmp*")):
        return False
    os.kill(pid, signal.SIGSTOP)
    _wait_until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    if any((out / "checkpoints").glob(".tmp*")):
        return True
    os.kill(pid, signal.SIGCONT)
    return False


def _wait_until(condition: Callable[[], bool], limit_s: float = 120) -> None:
    deadline_s = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline_s, "the run saves nothing: did it fail at its start?"
        time.sleep(0.0005)


def test_truncated_checkpoint_is_skipped_with_a_note(train: Train, whole: Outcome) -> None:
    part = train("part", {**EVERYTHING, "length": "1ep"})
    file = part.checkpoint / "optimizer.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    resumed = train("part", EVERYTHING, resume=True)
    assert resumed.bits().keys() == whole.bits().keys()
    notes = [e.text for e in read_events(resumed.folder.events) if isinstance(e, LogMessage)]
    assert any("using an older one" in text and part.checkpoint.name in text for text in notes), notes


def test_resume_without_a_run_starts_a_new_one_with_a_note(train: Train) -> None:
    run = train("fresh", {**EVERYTHING, "length": "1ep"}, resume=True)
    notes = [e.text for e in read_events(run.folder.events) if isinstance(e, LogMessage)]
    assert any("starting a new one" in text for text in notes), notes


def test_resuming_a_finished_run_changes_nothing(train: Train) -> None:
    first = train("run", {**EVERYTHING, "length": "1ep"})
    before = first.folder.events.read_bytes()
    again = train("run", {**EVERYTHING, "length": "1ep"}, resume=True)
    assert again.summary["exit_code"] == 0
    assert again.folder.events.read_bytes() == before


def test_a_finished_run_whose_last_checkpoint_is_damaged_trains_its_last_steps_again(train: Train) -> None:
    whole = train("run", {**EVERYTHING, "length": "1ep", "save.every": "2step"})
    weights = {path.name: path.read_bytes() for path in whole.checkpoint.glob("*.safetensors")}
    optimizer = whole.checkpoint / "optimizer.safetensors"
    optimizer.write_bytes(optimizer.read_bytes()[:-1] + b"?")
    train("run", {**EVERYTHING, "length": "1ep", "save.every": "2step"}, resume=True)
    assert {path.name: path.read_bytes() for path in whole.checkpoint.glob("*.safetensors")} == weights
    notes = [e.text for e in read_events(whole.folder.events) if isinstance(e, LogMessage)]
    assert any("is damaged" in text and "training its last steps again" in text for text in notes), notes


def test_finished_run_can_be_extended(train: Train) -> None:
    train("run", {**EVERYTHING, "length": "1ep"})
    longer = train("run", EVERYTHING, resume=True)
    assert longer.summary["steps"] == longer.summary["total_steps"] == 10
    notes = [e.text for e in read_events(longer.folder.events) if isinstance(e, LogMessage)]
    assert any("1ep -> 2ep" in text for text in notes), notes


def test_resume_with_a_changed_recipe_is_an_error_listing_all_differences(train: Train) -> None:
    train("run", {**EVERYTHING, "length": "1ep"})
    with pytest.raises(RecipeError) as refusal:
        train("run", {**EVERYTHING, "length": "1ep", "seed": "3", "batch.size": "32"}, resume=True)
    assert "seed" in str(refusal.value) and "batch.size" in str(refusal.value)
    assert refusal.value.code == 2


def test_killed_extended_run_can_be_resumed(train: Train, whole: Outcome, tmp_path: Path) -> None:
    """The summary of the shorter run must not make the longer one look finished."""
    train("run", {**EVERYTHING, "length": "1ep"})

    def die(event: Event) -> None:
        if isinstance(event, CheckpointSaved) and event.step == 9:
            raise SystemExit

    given = [(field, value, "--set") for field, value in SAVES_AT_ONCE.items()]
    with pytest.raises(SystemExit):
        reconv.train("quickstart", out=tmp_path / "run", overrides=given, resume=True, on_event=die)
    (tmp_path / "run" / "summary.json").unlink()  # a killed process writes none
    longer = train("run", EVERYTHING, resume=True)
    assert longer.summary["steps"] == whole.summary["steps"] == 10
    attempts = [e for e in read_events(longer.folder.events) if isinstance(e, AttemptStarted)]
    assert [a.from_step for a in attempts] == [0, 5, 9]


def test_new_attempt_deletes_the_previous_summary(train: Train, tmp_path: Path) -> None:
    train("run", {**EVERYTHING, "length": "1ep"})
    there: list[bool] = []
    given = [(field, value, "--set") for field, value in EVERYTHING.items()]
    reconv.train(
        "quickstart",
        out=tmp_path / "run",
        overrides=given,
        resume=True,
        on_event=lambda event: there.append((tmp_path / "run" / "summary.json").exists()),
    )
    assert there and not any(there)


@pytest.mark.parametrize("stop_at", [5, 10])
def test_evaluation_interrupted_by_a_signal_runs_after_resume(train: Train, tmp_path: Path, stop_at: int) -> None:
    """Also for the last evaluation: exit code 75, and the resumed run evaluates first."""
    settings = {**EVERYTHING, "log.every": "1step", "evaluate.batch_size": "36"}
    whole = train("whole", settings)
    given = [(field, value, "--set") for field, value in settings.items()]

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:  # logged right before its evaluation
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "parts", overrides=given, on_event=stop)
    resumed = train("parts", settings, resume=True)
    assert_same_bits(whole, resumed)
    scored = [(e.step, e.weights) for e in read_events(resumed.folder.events) if isinstance(e, EvalFinished)]
    assert scored == [(5, "raw"), (5, "ema"), (10, "raw"), (10, "ema")]
    assert resumed.summary["value"] == whole.summary["value"]


def test_resumed_run_remembers_its_data_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _cifar(tmp_path / "data" / "cifar-10-batches-bin")
    monkeypatch.setenv("DATA_DIR", str(tmp_path / "data"))
    tiny = {
        "length": "2step",
        "batch.size": "4",
        "save.every": "1step",
        "evaluate.every": "off",
        "model.name": "resnet8_cifar",
    }
    given = [(f, v, "--set") for f, v in tiny.items()]
    given += [("schedule.milestones", "[1step]", "--set")]
    first = reconv.train("cifar10-resnet20", out=tmp_path / "run", overrides=given)
    monkeypatch.delenv("DATA_DIR")
    longer = [*given[1:], ("length", "4step", "--set")]
    assert reconv.train("cifar10-resnet20", out=tmp_path / "run", overrides=longer, resume=True).summary["steps"] == 4
    assert reconv.evaluate(first.folder)[0].num_samples == 10


def _cifar(folder: Path) -> None:
    """CIFAR-10 binary files of ten images each."""
    folder.mkdir(parents=True)
    (folder / "batches.meta.txt").write_text("\n".join(f"class-{n}" for n in range(10)))
    for name in [*(f"data_batch_{n}.bin" for n in range(1, 6)), "test_batch.bin"]:
        draw = random.Random(name)
        (folder / name).write_bytes(b"".join(bytes([n]) + draw.randbytes(3072) for n in range(10)))


@pytest.mark.parametrize("stop_at", [3, 5])
def test_a_fork_without_changes_equals_the_uninterrupted_run(
    train: Train, whole: Outcome, tmp_path: Path, stop_at: int
) -> None:
    given = [(field, value, "--set") for field, value in EVERYTHING.items()]
    source = reconv.train("quickstart", out=tmp_path / "source", overrides=given, stop_after=f"{stop_at}step").folder
    forked = train("forked", {**EVERYTHING, "model.resume_from": str(source)})
    assert_same_bits(whole, forked)
    notes = [e.text for e in read_events(forked.folder.events) if isinstance(e, LogMessage)]
    assert any(f"step-{stop_at:09d}, a checkpoint of Reconv" in text for text in notes), notes


def test_a_fork_with_half_the_batch_continues_at_the_same_epoch(train: Train, tmp_path: Path) -> None:
    given = [(field, value, "--set") for field, value in EVERYTHING.items()]
    source = reconv.train("quickstart", out=tmp_path / "source", overrides=given, stop_after="1ep").folder
    with pytest.raises(RecipeError) as refusal:
        train("source", {**EVERYTHING, "schedule.lr": "0.05"}, resume=True)
    assert f"reconv resume {source} --fork --lr 0.05" in refusal.value.hint
    half = str(int(load(str(source / "recipe.yaml")).recipe.batch.size) // 2)
    forked = train("forked", {**EVERYTHING, "batch.size": half, "batch.group": "all", "model.resume_from": str(source)})
    (attempt,) = [e for e in read_events(forked.folder.events) if isinstance(e, AttemptStarted)]
    steps_per_epoch = forked.summary["total_steps"] / 2
    assert attempt.from_step == steps_per_epoch
    assert forked.summary["steps"] == forked.summary["total_steps"]


def test_a_finished_run_is_forked_with_more_epochs_only(train: Train) -> None:
    source = train("source", {**EVERYTHING, "length": "1ep"}).folder.path
    with pytest.raises(CheckpointError, match="the run has only 1ep") as refusal:
        train("forked", {**EVERYTHING, "length": "1ep", "model.resume_from": str(source)})
    assert refusal.value.hint.startswith("--epochs 2")
