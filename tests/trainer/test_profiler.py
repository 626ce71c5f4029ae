"""Profiling some steps of a real run: the trace, the table, and unchanged weights."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import reconv
from reconv.core.errors import PreemptedError, UsageError
from reconv.logging.event_log import read_events
from reconv.logging.events import Event, LogMessage, TrainProgress

SMALL = {
    "length": "8step",
    "data.subset_percent": "20",
    "save.every": "3step",
    "log.every": "1step",
    "evaluate.every": "off",
    "schedule.warmup": "2step",
    "batch.group": "16",
    "batch.micro": "32",
    "ema.decay": "0.9",
}


def _train(out: str, profile: str, *, resume: bool = False, stop_at: int | None = None) -> Path:
    def watch(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == stop_at:
            signal.raise_signal(signal.SIGTERM)

    given = [(field, value, "--set") for field, value in {**SMALL, "profile": profile}.items()]
    return reconv.train("quickstart", out=out, overrides=given, resume=resume, on_event=watch).folder


def _spans(trace: Path) -> dict[str, int]:
    """How often each part of a step is in a trace."""
    events: list[dict[str, Any]] = json.loads(trace.read_text())["traceEvents"]
    names = [e["name"] for e in events if e.get("cat") == "user_annotation" and e["ph"] == "X"]
    return {name: names.count(name) for name in set(names)}


def _notes(run: Path) -> list[str]:
    return [e.text for e in read_events(run / "events.jsonl") if isinstance(e, LogMessage)]


def test_profiling_does_not_change_the_weights() -> None:
    plain, traced = _train("plain", "off"), _train("traced", "[3, 5]")
    parts = sorted(path.name for path in (plain / "checkpoints/step-000000008").glob("*.safetensors"))
    assert parts == ["ema.safetensors", "model.safetensors", "optimizer.safetensors"]
    for part in parts:
        ours, theirs = (
            safetensors.torch.load_file(run / "checkpoints/step-000000008" / part) for run in (plain, traced)
        )
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert not (plain / "traces").exists()


def test_trace_contains_the_steps_of_its_inclusive_range() -> None:
    run = _train("run", "[3, 5]")
    assert sorted(path.name for path in (run / "traces").iterdir()) == ["steps-3-5.json", "steps-3-5.txt"]
    # Two micro-batches a step: three steps have six forward and backward passes.
    assert _spans(run / "traces/steps-3-5.json") == {"data wait": 3, "forward": 6, "backward": 6, "optimizer": 3}


def test_profile_table_has_step_parts_and_operators() -> None:
    run = _train("run", "[4, 4]")
    [note] = [text for text in _notes(run) if "trace" in text]
    assert note.startswith("step 4: ")
    table = (run / "traces/steps-4-4.txt").read_text()
    assert table.strip() in note
    for word in ("data wait", "forward", "backward", "optimizer", "everything else", "aten::convolution_backward"):
        assert word in table
    report = (run / "report.html").read_text()
    assert "aten::convolution_backward" in report

    [phases] = [text for text in _notes(run) if text.startswith("where the time went")]
    assert {"plan", "training", "saves", "reports"} <= {line.split()[0] for line in phases.splitlines()[1:]}

    times = [float(line.split()[-3]) for line in table.splitlines()[1:6]]
    whole = float(table.splitlines()[0].split()[2])
    assert sum(times) == pytest.approx(whole, abs=0.05)


def test_stop_inside_the_profile_range_writes_a_trace_and_resume_the_rest() -> None:
    with pytest.raises(PreemptedError):
        _train("run", "[3, 7]", stop_at=4)
    assert _spans(Path("run/traces/steps-3-4.json"))["optimizer"] == 2
    run = _train("run", "[3, 7]", resume=True)
    assert _spans(run / "traces/steps-5-7.json")["optimizer"] == 3


def test_profile_range_before_the_resume_step_is_a_warning() -> None:
    with pytest.raises(PreemptedError):
        _train("run", "off", stop_at=5)
    run = _train("run", "[2, 3]", resume=True)
    assert any("steps 2 to 3 are already done" in text for text in _notes(run))
    assert not (run / "traces").exists()


def test_profile_range_beyond_the_end_is_an_error() -> None:
    with pytest.raises(UsageError, match="step 9 cannot be profiled"):
        _train("run", "[7, 9]")
    assert list(Path().iterdir()) == []
