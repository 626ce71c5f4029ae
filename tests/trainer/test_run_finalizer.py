"""`RunEnded` is logged once, with the exit code and reason."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

import reconv
from reconv.core.errors import ExitCode, PreemptedError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, RunEnded, TrainProgress
from reconv.trainer.run import TrainingRun

SETTINGS = {"length": "2step", "schedule.warmup": "0step", "log.every": "1step", "evaluate.every": "off"}
GIVEN = [(field, value, "test") for field, value in SETTINGS.items()]


def ends(run: Path) -> list[tuple[int, str]]:
    return [(e.exit_code, e.reason) for e in read_events(run / "events.jsonl") if isinstance(e, RunEnded)]


def test_finished_run_logs_run_ended_once(tmp_path: Path) -> None:
    reconv.train("quickstart", out=tmp_path / "run", overrides=GIVEN)
    assert ends(tmp_path / "run") == [(ExitCode.OK, "finished")]


@pytest.mark.parametrize(
    ("error", "end"),
    [
        (KeyboardInterrupt(), (ExitCode.INTERRUPTED, "interrupted without saving a checkpoint")),
        (MemoryError(), (ExitCode.RESOURCES, "out of memory")),
        (ValueError("a bug"), (ExitCode.UNEXPECTED, "unexpected error")),
        (reconv.core.errors.DataError("a bad file"), (ExitCode.DATA, "a bad file")),
    ],
)
def test_run_ended_has_the_exit_code_and_reason_of_the_error(
    tmp_path: Path, error: BaseException, end: tuple[int, str]
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, TrainProgress):
            raise error

    with pytest.raises((type(error), reconv.core.errors.ReconvError)) as caught:
        reconv.train("quickstart", out=tmp_path / "run", overrides=GIVEN, on_event=fail)
    assert error in (caught.value, caught.value.__cause__)
    assert ends(tmp_path / "run") == [end]
    assert (tmp_path / "run" / "summary.json").is_file() and (tmp_path / "run" / "report.html").is_file()


def test_failing_to_write_the_summary_does_not_hide_the_error(tmp_path: Path) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, TrainProgress):
            (tmp_path / "run" / "summary.json").mkdir()
            raise ValueError("a bug")

    with pytest.raises(ValueError, match="a bug") as caught:
        reconv.train("quickstart", out=tmp_path / "run", overrides=GIVEN, on_event=fail)
    assert ["could not be written" in note for note in caught.value.__notes__] == [True]
    assert len(ends(tmp_path / "run")) == 1


def test_only_the_first_error_is_logged(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a later error"), TrainingRun.open("quickstart", GIVEN, out="run") as run:
        run.finalizer.log_error(reconv.core.errors.ResourceError("a process is lost"))
        raise ValueError("a later error")
    assert ends(tmp_path / "run") == [(ExitCode.RESOURCES, "a process is lost")]


def test_finished_interrupted_and_resumed_runs_have_phases_that_add_up(tmp_path: Path) -> None:
    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == 1:
            signal.raise_signal(signal.SIGTERM)

    before_s = time.perf_counter()
    with pytest.raises(PreemptedError):
        reconv.train("quickstart", out=tmp_path / "run", overrides=GIVEN, on_event=stop)
    first_s = time.perf_counter() - before_s
    reconv.train("quickstart", out=tmp_path / "run", overrides=GIVEN, resume=True)
    second_s = time.perf_counter() - before_s - first_s
    stopped, resumed = (e for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e, RunEnded))
    for end, limit_s in ((stopped, first_s), (resumed, second_s)):
        assert end.wall_s < sum(end.phases.values()) < limit_s
        assert {"plan", "data_index", "model", "first_step", "training", "saves", "end"} <= set(end.phases)
        assert min(end.phases.values()) >= 0
        assert end.startup_s is not None and end.phases["first_step"] < end.startup_s < sum(end.phases.values())


def test_a_run_that_fails_before_its_first_step_has_phases(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="a bug"), TrainingRun.open("quickstart", GIVEN, out="run"):
        raise ValueError("a bug")
    [end] = [e for e in read_events(tmp_path / "run" / "events.jsonl") if isinstance(e, RunEnded)]
    assert {"plan", "data_index"} <= set(end.phases) and end.startup_s is None
