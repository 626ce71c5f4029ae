"""CSV tables and the MLPerf log, of real runs and of invented events."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

import reconv
from reconv.logging.event_log import EventLog, latest_by_step, read_events
from reconv.logging.events import AttemptStarted, EvalFinished, Event, RunEnded, RunPlanned, TrainProgress
from reconv.logging.exporters import ExporterSet
from reconv.recipe.loader import load

SMALL = {
    "length": "8step",
    "data.subset_percent": "20",
    "save.every": "3step",
    "log.every": "1step",
    "evaluate.every": "3step",
    "schedule.warmup": "2step",
}


class KilledError(Exception):
    """A process that dies in the middle of a run."""


def _train(out: str, loggers: str, *, resume: bool = False, kill_at: int | None = None) -> Path:
    def on_event(event: Event) -> None:
        if isinstance(event, TrainProgress) and event.step == kill_at:
            raise KilledError

    overrides = [(field, value, "--set") for field, value in {**SMALL, "loggers": loggers}.items()]
    return reconv.train("quickstart", out=out, overrides=overrides, resume=resume, on_event=on_event).folder


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def _marks(path: Path) -> list[dict[str, Any]]:
    lines = path.read_text().splitlines()
    assert all(line.startswith(":::MLLOG ") for line in lines)
    return [json.loads(line.removeprefix(":::MLLOG ")) for line in lines]


def test_tables_of_a_resumed_run_equal_those_of_an_uninterrupted_one() -> None:
    uninterrupted = _train("uninterrupted", "csv")
    with pytest.raises(KilledError):
        _train("killed", "csv", kill_at=5)
    killed = Path("killed")
    assert [row["step"] for row in _rows(killed / "training.csv")] == ["1", "2", "3", "4"]
    with (killed / "training.csv").open("a") as file:
        file.write("5,0.9,0.0")  # a row cut by a crash
    _train("killed", "csv", resume=True)

    tables = {
        "training.csv": ("step", "epoch", "lr", "loss", "top1", "grad_norm"),
        "validation.csv": ("weights", "step", "epoch", "top1", "top5", "loss", "best", "num_samples"),
    }
    for name, columns in tables.items():
        expected = [[row[column] for column in columns] for row in _rows(uninterrupted / name)]
        assert [[row[column] for column in columns] for row in _rows(killed / name)] == expected
    assert [row["step"] for row in _rows(killed / "training.csv")] == [str(step) for step in range(1, 9)]
    assert [row["step"] for row in _rows(killed / "validation.csv")] == ["3", "6", "8"]


def test_tables_have_the_exact_values_of_the_events() -> None:
    run = _train("run", "csv")
    events = [e for e in latest_by_step(read_events(run / "events.jsonl")) if isinstance(e, TrainProgress)]
    rows = _rows(run / "training.csv")
    assert len(rows) == len(events) == 8
    for row, event in zip(rows, events, strict=True):
        assert float(row["loss"]) == event.loss
        assert float(row["top1"]) == event.metrics["top1"]
        assert (row["images_per_s"] == "") == (event.images_per_s is None)
    assert float(rows[-1]["step_s"]) == pytest.approx(64 / float(rows[-1]["images_per_s"]))


def test_loggers_added_at_a_resume_have_the_whole_run() -> None:
    with pytest.raises(KilledError):
        _train("run", "off", kill_at=5)
    assert not Path("run/training.csv").exists()
    run = _train("run", "csv,mlperf", resume=True)
    assert [row["step"] for row in _rows(run / "training.csv")] == [str(step) for step in range(1, 9)]
    assert [mark["key"] for mark in _marks(run / "mlperf.log")].count("run_start") == 1


def test_no_exporter_is_enabled_by_default() -> None:
    run = _train("run", "off")
    assert {path.name for path in run.iterdir()} == {
        *("recipe.yaml", "events.jsonl", "summary.json", "report.html", "best.json", "lock", "checkpoints", "images"),
        *("classification.json", "run.json", "alive"),
    }


Export = Callable[[Sequence[Event]], Path]


@pytest.fixture
def export(tmp_path: Path) -> Export:
    """A function that passes events to the exporters of one run directory, as one process would."""
    folder = tmp_path / "run"
    folder.mkdir()

    def run(events: Sequence[Event]) -> Path:
        overrides = [
            ("loggers", "csv,mlperf", "--set"),
            ("expect.value", "0.9", "--set"),
            ("expect.tolerance", "0", "--set"),
        ]
        warnings: list[Event] = []
        exporters = ExporterSet(load("quickstart", overrides).recipe, folder, warnings.append)
        with EventLog(folder / "events.jsonl") as log:
            for event in events:
                exporters.on_event(log.write(event))
        exporters.close()
        assert warnings == []
        return folder

    return run


def _start(from_step: int, time_s: float) -> list[Event]:
    return [
        AttemptStarted(1 if from_step == 0 else 2, from_step, ("reconv",), {}, time_s=time_s),
        RunPlanned("quickstart", "classification", 20, 10.0, 64, (), 0, "resnet8_cifar", time_s=time_s + 1),
    ]


def _progress(step: int, time_s: float, **metrics: float) -> TrainProgress:
    return TrainProgress(step, step / 10, 1.0, 0.1, metrics, "", 1.0, 100.0, 110.0, 0.0, 1, None, time_s=time_s)


def _score(step: int, top1: float, time_s: float) -> EvalFinished:
    return EvalFinished(step, step / 10, "raw", {"top1": top1}, 100, 0.5, best=False, time_s=time_s)


def _end(step: int, code: int, time_s: float) -> RunEnded:
    return RunEnded(step, code, "finished" if code == 0 else "unexpected error", 1.0, 0, 0, time_s=time_s)


def test_mlperf_intervals_start_and_stop_in_order(export: Export) -> None:
    first = [*_start(0, 100.0), _progress(4, 102.0), _progress(8, 103.0), _progress(12, 105.0), _score(12, 0.8, 106.0)]
    second = [
        *_start(12, 200.0),
        _progress(16, 201.0),
        _progress(20, 202.0),
        _score(20, 0.95, 203.0),
        _end(20, 0, 204.0),
    ]
    export([*first, _end(12, 1, 107.0)])
    marks = _marks(export(second) / "mlperf.log")

    intervals = [m["key"] for m in marks if m["event_type"] != "POINT_IN_TIME"]
    assert intervals == [
        *("init_start", "init_stop", "run_start"),
        *("epoch_start", "epoch_stop", "epoch_start", "eval_start", "eval_stop"),
        *("epoch_stop", "eval_start", "eval_stop", "run_stop"),
    ]
    assert [m["time_ms"] for m in marks] == sorted(m["time_ms"] for m in marks)
    assert [m["value"] for m in marks if m["key"] == "eval_accuracy"] == [0.8, 0.95]
    assert [m["metadata"]["epoch_num"] for m in marks if m["key"] == "epoch_stop"] == [1, 2]
    points = {m["key"]: m["value"] for m in marks if m["event_type"] == "POINT_IN_TIME"}
    assert points["global_batch_size"] == 64
    assert points["opt_name"] == "sgd"
    assert points["seed"] == 0
    assert points["target_accuracy"] == 0.9
    assert not any(m["key"].startswith("submission") for m in marks)


@pytest.mark.parametrize(("top1", "code", "status"), [(0.9, 0, "success"), (0.89, 0, "aborted"), (0.95, 5, "aborted")])
def test_the_mlperf_status_is_success_at_the_target(export: Export, top1: float, code: int, status: str) -> None:
    events = [*_start(0, 100.0), _progress(10, 102.0), _score(10, top1, 103.0), _end(10, code, 104.0)]
    last = _marks(export(events) / "mlperf.log")[-1]
    assert last["key"] == "run_stop"
    assert last["metadata"] == {"status": status, "target": 0.9, "target_reached": top1 >= 0.9}


def test_a_metric_that_appears_later_becomes_a_column(export: Export) -> None:
    folder = export([*_start(0, 100.0), _progress(1, 102.0, top1=0.5), _progress(2, 103.0, top1=0.6, top5=0.9)])
    rows = _rows(folder / "training.csv")
    assert [(row["step"], row["top1"], row["top5"]) for row in rows] == [("1", "0.5", ""), ("2", "0.6", "0.9")]


def test_non_finite_values_stay_readable(export: Export) -> None:
    folder = export([*_start(0, 100.0), _progress(1, 102.0, top1=float("nan")), _score(10, float("nan"), 103.0)])
    assert _rows(folder / "training.csv")[0]["top1"] == "nan"
    assert [m["value"] for m in _marks(folder / "mlperf.log") if m["key"] == "eval_accuracy"] == [None]
