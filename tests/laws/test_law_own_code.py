"""Laws 1, 2, 3 and 9 for users' own code: network, dataset, loss, transforms, metric and the state of a callback."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from ranks import in_ranks

import reconv
from reconv.core.errors import ExitCode, ReconvError
from reconv.logging.event_log import latest_by_step, read_events
from reconv.logging.events import EvalFinished, ScalarLogged, TrainProgress

from .conftest import Outcome, Train

OWN = {
    "model": "{name: own_code:Net, options: {width: 6}}",
    "data.source": "own_code:Squares",
    "loss": "{name: own_code:Tempered, options: {gamma: 2.0}}",
    "augment.extra": "[own_code:Blur, {name: own_code:Brighten, options: {amount: 0.3}, on_device: true}]",
    "metrics": "own_code:MacroRecall",
    "callbacks": "[{name: own_code:Count}]",
    "evaluate.best_metric": "macro_recall",
    "length": "8step",
    "schedule.warmup": "2step",
    "batch.size": "24",
    "batch.group": "8",
    "batch.micro": "8",
    "save.every": "3step",
    "evaluate.every": "4step",
    "evaluate.batch_size": "10",
    "log.every": "1step",
    "engine.num_threads": "1",
    "parallel.reduce": "ordered",
    "loggers": "csv",
}


def train_here(out: str, settings: dict[str, str]) -> int:
    given = [(field, value, "--set") for field, value in settings.items()]
    return int(reconv.train("quickstart", out=out, overrides=given).exit_code)


def history(outcome: Outcome) -> list[tuple[object, ...]]:
    """Losses, metrics and logged values of a run, by step."""
    found: list[tuple[object, ...]] = []
    for event in latest_by_step(read_events(outcome.folder.events)):
        match event:
            case TrainProgress():
                found.append((event.step, "loss", event.loss))
            case EvalFinished():
                found.append((event.step, "eval", *sorted(event.metrics.items())))
            case ScalarLogged():
                found.append((event.step, event.name, event.value))
    return sorted(found, key=str)


def assert_same_run(one: Outcome, other: Outcome) -> None:
    ours, theirs = one.bits(), other.bits()
    for bits in (ours, theirs):
        bits.pop("loss/calls")  # depends on the number of micro-batches
    assert len(ours) > 12 and ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []
    assert history(one) == history(other)
    assert one.checkpoint.name == other.checkpoint.name


@pytest.mark.parametrize("stop_after", ["4step", pytest.param("5step", marks=pytest.mark.slow)])
def test_a_resumed_run_equals_the_uninterrupted_one(train: Train, tmp_path: Path, stop_after: str) -> None:
    whole = train("whole", OWN)
    given = [(field, value, "--set") for field, value in OWN.items()]
    reconv.train("quickstart", out=tmp_path / "parts", overrides=given, stop_after=stop_after)
    parts = train("parts", OWN, resume=True)
    assert_same_run(whole, parts)
    loss = whole.parts["loss"]
    assert loss["log_scale"] != 0 and loss["calls"] >= 8  # trained, and kept
    values = {tuple(row[:2]): row[2] for row in history(whole) if str(row[1]).startswith("count")}
    assert [values[step, "count/steps"] for step in range(1, 9)] == list(range(1, 9))
    assert 0 < values[8, "count/recall"] < 1
    state = json.loads((parts.checkpoint / "state.json").read_text())
    assert state["callbacks"]["0 own_code:Count"] == {"steps": 8, "evaluations": 2}
    assert state["code"].keys() == {"own_code.py"}
    with (parts.folder.path / "scalars.csv").open(newline="") as file:
        exported = {(int(row["step"]), row["name"]): float(row["value"]) for row in csv.DictReader(file)}
    assert exported == values


@pytest.mark.slow
def test_micro_batches_and_workers_do_not_change_the_run(train: Train) -> None:
    whole = train("whole", {**OWN, "batch.micro": "24"})
    changed = {"batch.micro": "16", "data.num_workers": "2", "data.backend": "processes", "evaluate.batch_size": "7"}
    assert_same_run(whole, train("other", {**OWN, **changed}))


@pytest.mark.slow
@pytest.mark.parametrize("stop_at", [0, 5])
def test_two_ranks_equal_one_also_when_a_callback_stops_them(stop_at: int) -> None:
    settings = {**OWN, "callbacks": f"[{{name: own_code:Count, options: {{stop_at: {stop_at}}}}}]"}
    outcomes = []
    for size in (1, 2):
        folder = Path.cwd() / f"of-{size}"
        assert in_ranks(size, train_here, str(folder), settings) == [0] * size
        outcomes.append(Outcome(folder, {}))
    assert_same_run(*outcomes)
    assert outcomes[1].checkpoint.name == f"step-{stop_at or 8:09d}"
    assert len([event for event in history(outcomes[1]) if event[1] == "loss"]) == (stop_at or 8)


@pytest.mark.slow
def test_parameters_of_a_loss_are_reduced_by_ddp() -> None:
    settings = {**OWN, "parallel.reduce": "fast", "precision.mode": "fp64", "callbacks": "[]", "augment.extra": "[]"}
    weights = []
    for size in (1, 2):
        folder = Path.cwd() / f"of-{size}"
        assert in_ranks(size, train_here, str(folder), settings) == [0] * size
        weights.append(Outcome(folder, {}).bits())
    one, two = weights
    assert one["loss/log_scale"] != 0
    for name in one.keys() - {"loss/calls"}:
        torch.testing.assert_close(one[name], two[name], rtol=1e-9, atol=1e-12)


def run_broken(out: str, settings: dict[str, str]) -> tuple[int, str]:
    try:
        return train_here(out, settings), ""
    except ReconvError as error:
        return int(error.code), error.where


def test_an_exception_in_a_rank_shows_its_line_and_ends_all_ranks_with_2() -> None:
    results = in_ranks(2, run_broken, str(Path.cwd() / "run"), {**OWN, "model": "{name: own_code:Broken}"})
    assert [code for code, _ in results] == [ExitCode.USAGE] * 2
    assert 'raise ValueError("not today")' in results[0][1]
