"""`RunEnded` is logged once, with the exit code and reason."""

from __future__ import annotations

from pathlib import Path

import pytest

import reconv
from reconv.errors import ExitCode
from reconv.logging.events import Event, RunEnded, TrainProgress, read_events
from reconv.trainer.training_run import TrainingRun

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
        (reconv.errors.DataError("a bad file"), (ExitCode.DATA, "a bad file")),
    ],
)
def test_run_ended_has_the_exit_code_and_reason_of_the_error(
    tmp_path: Path, error: BaseException, end: tuple[int, str]
) -> None:
    def fail(event: Event) -> None:
        if isinstance(event, TrainProgress):
            raise error

    with pytest.raises((type(error), reconv.errors.ReconvError)) as caught:
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
        run.finalizer.log_error(reconv.errors.ResourceError("a process is lost"))
        raise ValueError("a later error")
    assert ends(tmp_path / "run") == [(ExitCode.RESOURCES, "a process is lost")]
