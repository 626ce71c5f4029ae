"""`summary.json`: its keys, and its values for runs that failed or were resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from run_example import write_run

from reconv.logging.event_log import EventLog
from reconv.logging.events import AttemptStarted, EvalFinished, Event, RunEnded, RunPlanned, TrainProgress
from reconv.logging.formatting import result, state
from reconv.logging.run_dir import read_summary
from reconv.recipe.load.adapt import describe
from reconv.report.run_record import load_run_record
from reconv.report.sections import changed_fields
from reconv.report.summary import summarize, write_summary

KEYS = {
    *("recipe", "task", "metric", "value", "best", "steps", "images", "wall_s"),
    *("images_per_s", "compute_images_per_s", "images_per_s_per_device", "compute_images_per_s_per_device"),
    *("data_wait_fraction", "peak_memory_bytes", "expect", "exit_code", "attempts", "report", "num_parameters"),
}


def write_events(folder: Path, *events: Event, expect: str = "") -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "recipe.yaml").write_text(f"name: tiny\n{expect}")
    with EventLog(folder / "events.jsonl") as log:
        for event in events:
            log.write(event)
    return folder


START = AttemptStarted(1, 0, ("reconv", "train", "tiny"), {})
PLAN = RunPlanned("tiny", "classification", 100, 10.0, 8, (), 1000, num_devices=4)


def evaluated(step: int, top1: float, weights: str = "raw", *, partial: bool = False) -> EvalFinished:
    return EvalFinished(step, step / 10, weights, {"top1": top1, "loss": 1 - top1}, 10, 0.1, False, partial)


def progress(step: int, images_per_s: float | None = 100.0) -> TrainProgress:
    return TrainProgress(step, step / 10, 1.0, 0.1, {}, "", 1.0, images_per_s, images_per_s, 0.2, 77, None)


def test_summary_json_has_the_documented_keys(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    summary = write_summary(run)
    assert set(summary) >= KEYS
    assert set(summary["expect"]) == {"metric", "value", "tolerance", "met"}
    assert summary == read_summary(run) == summarize(run)
    assert [path.name for path in run.iterdir() if path.name.startswith(".")] == []


def test_the_result_of_a_finished_run_is_one_line(tmp_path: Path) -> None:
    summary = summarize(write_run(tmp_path / "run"))
    assert result(summary) == "top-1 99.44 % (expected 99.0 ± 0.5: met)"
    assert summary["images"] == 440 * 64
    assert summary["resume_command"] is None


def test_value_is_of_the_last_and_best_of_the_best_evaluation(tmp_path: Path) -> None:
    run = write_events(tmp_path / "r", START, PLAN, evaluated(10, 0.5), evaluated(20, 0.9), evaluated(30, 0.8))
    summary = summarize(run)
    assert (summary["value"], summary["best"], summary["best_step"]) == (0.8, 0.9, 20)


def test_the_result_is_of_the_ema_weights_if_there_are_any(tmp_path: Path) -> None:
    summary = summarize(write_events(tmp_path / "r", START, PLAN, evaluated(10, 0.9), evaluated(10, 0.7, "ema")))
    assert (summary["value"], summary["weights"]) == (0.7, "ema")


def test_a_partial_evaluation_is_not_the_result(tmp_path: Path) -> None:
    run = write_events(tmp_path / "r", START, PLAN, evaluated(10, 0.5), evaluated(20, 0.9, partial=True))
    assert summarize(run)["value"] == 0.5


@pytest.mark.parametrize(
    ("metric", "value", "expected", "met"),
    [
        ("top1", 0.985, 0.99, True),  # 0.99 - 0.005 is 0.985 on paper, not in binary
        ("top1", 0.9849, 0.99, False),
        ("top1", 1.0, 0.99, True),
        ("loss", 0.015, 0.01, True),
        ("loss", 0.016, 0.01, False),
        ("loss", 0.0, 0.01, True),
        ("top1", math.nan, 0.99, False),
    ],
)
def test_an_expectation_is_met_within_its_tolerance(
    tmp_path: Path, metric: str, value: float, expected: float, met: bool
) -> None:
    expect = f"expect: {{metric: {metric}, value: {expected}, tolerance: 0.005}}\n"
    measured = EvalFinished(10, 1.0, "raw", {metric: value}, 10, 0.1, False)
    run = write_events(tmp_path / "r", START, PLAN, measured, RunEnded(10, 0, "finished", 1.0, 80, 1), expect=expect)
    summary = write_summary(run)
    assert summary["expect"]["met"] is met
    assert state(summary) == ("met" if met else "missed")


def test_an_expectation_for_another_metric_is_not_measured(tmp_path: Path) -> None:
    end = RunEnded(10, 0, "finished", 1.0, 80, 1)
    run = write_events(
        tmp_path / "r", START, PLAN, evaluated(10, 0.9), end, expect="expect: {metric: map, value: 0.5}\n"
    )
    summary = summarize(run)
    assert summary["expect"]["met"] is None
    assert "not measured" in result(summary)


def test_a_run_without_evaluations_has_no_value(tmp_path: Path) -> None:
    summary = write_summary(write_events(tmp_path / "r", START, PLAN))
    assert (summary["metric"], summary["value"], summary["best"], summary["exit_code"]) == (None, None, None, None)
    assert summary["resume_command"] == f"reconv resume {tmp_path / 'r'}"


def test_rates_are_per_device_too(tmp_path: Path) -> None:
    end = RunEnded(100, 0, "finished", 20.0, 800, 5, train_s=10.0, wait_s=2.0, timed_images=400)
    summary = summarize(write_events(tmp_path / "r", START, PLAN, end))
    assert (summary["images_per_s"], summary["compute_images_per_s"]) == (40.0, 50.0)
    assert (summary["images_per_s_per_device"], summary["compute_images_per_s_per_device"]) == (10.0, 12.5)
    assert (summary["data_wait_fraction"], summary["images"], summary["wall_s"]) == (0.2, 800, 20.0)


def test_a_killed_attempt_counts_up_to_its_last_logged_event(tmp_path: Path) -> None:
    run = write_events(
        tmp_path / "r",
        AttemptStarted(1, 0, ("reconv",), {}, time_s=1000.0),
        PLAN,
        progress(10, None),
        progress(30),
        progress(40),
        AttemptStarted(2, 30, ("reconv",), {}, time_s=2000.0),
        progress(50),
        RunEnded(50, 75, "preempted", 7.0, 160, 99, train_s=1.6, wait_s=0.0, timed_images=160),
    )
    with (run / "events.jsonl").open() as file:
        lines = [json.loads(line) for line in file]
    for record in lines:
        del record["crc32c"]
    for record in lines[1:5]:
        record["time_s"] = 1003.0
    (run / "events.jsonl").write_text("".join(json.dumps(record) + "\n" for record in lines))
    summary = summarize(run)
    assert (summary["attempts"], summary["steps"], summary["images"]) == (2, 50, 40 * 8 + 160)
    assert summary["wall_s"] == 3.0 + 7.0
    # The first ten steps have no rate; thirty steps at 100 images/s and twenty at 160 / 1.6.
    assert summary["images_per_s"] == pytest.approx(100.0)
    assert summary["peak_memory_bytes"] == 99
    assert state(summary) == "stopped"


def test_a_value_that_is_not_a_number_is_null(tmp_path: Path) -> None:
    summary = write_summary(write_events(tmp_path / "r", START, PLAN, evaluated(10, math.nan)))
    assert summary["value"] is None
    assert "NaN" not in (tmp_path / "r" / "summary.json").read_text()


def test_a_recipe_is_read_in_its_own_dialect_of_yaml(tmp_path: Path) -> None:
    expect = "expect: {value: 0.9, on: my test set}\noptimizer: {weight_decay: 1e-4}\n"
    record = load_run_record(write_events(tmp_path / "run", START, PLAN, expect=expect))
    assert {"expect.value", "expect.on"} == set(changed_fields(record.recipe))  # not expect.True, and 1e-4 is a number
    assert record.title == "tiny"


def test_the_title_of_a_changed_recipe_says_so(tmp_path: Path) -> None:
    claim = f"description: '{describe(['length 5ep'])}'\n"
    assert load_run_record(write_events(tmp_path / "run", START, PLAN, expect=claim)).title == "tiny, changed"
