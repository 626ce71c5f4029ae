"""Early stopping by a target and by patience."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
import safetensors.torch
import torch

import reconv
from reconv.cli import main
from reconv.core.errors import PreemptedError
from reconv.logging.event_log import read_events
from reconv.logging.events import CheckpointSaved, Event, LogMessage, RunEnded, TrainProgress
from reconv.logging.run_dir import RunDir
from reconv.trainer.callbacks.early_stopping import EarlyStopping

SMALL = {"length": "8ep", "data.subset_percent": "25", "batch.size": "64", "log.every": "7step"}  # epochs of 5 steps
# No rate and no batch norm: every evaluation gives the same, so nothing ever gets better.
STILL = {**SMALL, "schedule.lr": "1e-30", "model.options": "{norm: group}", "early_stopping.patience": "2"}


def train(
    out: Path, settings: dict[str, str], *, resume: bool = False, on_event: object = None
) -> reconv.api.RunResult:
    given = [(name, value, "--set") for name, value in settings.items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=resume, on_event=on_event)


@pytest.mark.parametrize(
    ("rule", "values", "ends"),
    [
        (EarlyStopping(), [0.1, 0.1, 0.1], False),
        (EarlyStopping(target=0.5), [], False),
        (EarlyStopping(target=0.5), [0.4999], False),
        (EarlyStopping(target=0.5), [0.1, 0.5], True),
        (EarlyStopping(patience=2), [0.3, 0.2], False),
        (EarlyStopping(patience=2), [0.3, 0.2, 0.1], True),
        (EarlyStopping(patience=2), [0.3, 0.3, 0.3], True),  # equal is not better
        (EarlyStopping(patience=2), [0.3, 0.2, 0.4, 0.1], False),
        (EarlyStopping(target=0.9, patience=1), [0.3, 0.2], True),
    ],
)
def test_early_stopping_rules(rule: EarlyStopping, values: list[float], ends: bool) -> None:
    assert bool(rule.reason("top1", values)) is ends


def test_patience_ends_the_run_with_exit_code_0_and_a_reason(tmp_path: Path) -> None:
    result = train(tmp_path / "run", STILL)
    summary = result.summary
    assert result.exit_code == summary["exit_code"] == 0
    assert (summary["steps"], summary["total_steps"]) == (15, 40)  # the first evaluation and two no better
    assert "early_stopping.patience 2" in summary["stopped_early"]
    assert summary["resume_command"] is None
    assert RunDir(tmp_path / "run").is_finished()
    events = read_events(tmp_path / "run/events.jsonl")
    assert any("stopped early" in e.text for e in events if isinstance(e, LogMessage))
    assert [e.reason for e in events if isinstance(e, RunEnded)] == [f"stopped early: {summary['stopped_early']}"]
    assert [(e.step, e.reason) for e in events if isinstance(e, CheckpointSaved)][-1] == (15, "end")
    assert [e.step for e in events if isinstance(e, TrainProgress)] == [7, 14, 15]
    assert "It stopped early at step 15 of 40" in (tmp_path / "run/report.html").read_text()


def test_resuming_an_early_stopped_run_does_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path / "run", STILL)
    before = (tmp_path / "run/events.jsonl").read_bytes()
    again = train(tmp_path / "run", STILL, resume=True)
    assert again.summary["steps"] == 15
    assert (tmp_path / "run/events.jsonl").read_bytes() == before
    words = [word for name, value in STILL.items() for word in ("--set", f"{name}={value}")]
    with pytest.raises(SystemExit) as end:
        main(["train", "quickstart", "--out", str(tmp_path / "run"), "--resume", *words])
    assert end.value.code == 0


def test_run_ends_at_the_evaluation_that_reaches_the_target(tmp_path: Path) -> None:
    result = train(tmp_path / "run", {**SMALL, "early_stopping.target": "0.3", "checkpoint_average.last": "2ep"})
    summary = result.summary
    assert summary["best"] >= 0.3 and "early_stopping.target 0.3" in summary["stopped_early"]
    assert 5 < summary["steps"] < 40 and summary["steps"] % 5 == 0
    # What an average needs had been kept all along, although nobody knew where the run would end.
    assert summary["averaged"]["steps"] == [summary["steps"] - 5, summary["steps"]]


def test_resumed_run_stops_early_at_the_same_step_with_the_same_bits(tmp_path: Path) -> None:
    settings = {**SMALL, "early_stopping.target": "0.3", "log.every": "1step"}
    whole = train(tmp_path / "whole", settings)
    last = int(whole.summary["steps"])

    def stop(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == last - 1:
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(PreemptedError):
        train(tmp_path / "parts", settings, on_event=stop)
    resumed = train(tmp_path / "parts", settings, resume=True)
    assert resumed.summary["steps"] == last
    assert resumed.summary["stopped_early"] == whole.summary["stopped_early"]
    a, b = (
        safetensors.torch.load_file(r.folder / f"checkpoints/step-{last:09d}/model.safetensors")
        for r in (whole, resumed)
    )
    assert len(a) > 30 and all(torch.equal(a[name], b[name]) for name in a)


def test_run_killed_before_its_summary_ends_at_the_same_step_after_resume(tmp_path: Path) -> None:
    train(tmp_path / "run", STILL)
    (tmp_path / "run/summary.json").unlink()
    assert not RunDir(tmp_path / "run").is_finished()
    resumed = train(tmp_path / "run", STILL, resume=True)
    assert (resumed.exit_code, resumed.summary["steps"]) == (0, 15)
    assert "early_stopping.patience 2" in resumed.summary["stopped_early"]


def test_patience_exhausted_at_the_last_step_is_not_early_stopping(tmp_path: Path) -> None:
    result = train(tmp_path / "run", {**STILL, "length": "3ep"})
    assert result.summary["stopped_early"] is None
    assert result.summary["steps"] == result.summary["total_steps"] == 15
