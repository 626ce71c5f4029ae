"""Time that failures cost: the best interval between saves, and the pauses of the engines."""

from __future__ import annotations

import json
import math
import re
import statistics
from pathlib import Path

import pytest
from click.testing import CliRunner

from reconv.cli import reconv
from reconv.planner.failures import (
    DAY_S,
    FAILURES_PER_1000_DEVICES_AND_DAY,
    Failures,
    curve,
    engine_pauses,
    lost_time,
)

ROOT = Path(__file__).parents[2]


def test_the_default_rate_is_that_of_llama_3() -> None:
    failures = Failures()
    assert failures.per_day(16_384) * 54 == pytest.approx(419)
    assert failures.between_s(16_384) / 3600 == pytest.approx(3.09, abs=0.01)  # hours


@pytest.mark.parametrize(("devices", "save_s"), [(8, 0.03), (1_000, 5.0), (16_384, 60.0), (100_000, 300.0)])
def test_no_other_interval_loses_less(devices: int, save_s: float) -> None:
    failures = Failures(save_s=save_s)
    best_s = failures.best_interval_s(devices)
    least = failures.lost_s_per_day(devices, best_s, 12.0)
    for factor in (0.25, 0.5, 2.0, 4.0):
        assert failures.lost_s_per_day(devices, factor * best_s, 12.0) > least


def test_rare_failures_give_youngs_interval() -> None:
    failures = Failures(save_s=0.01)
    assert failures.best_interval_s(8) == pytest.approx(math.sqrt(2 * 0.01 * failures.between_s(8)), rel=0.01)


def test_lost_time_is_saves_repeated_steps_and_pauses() -> None:
    failures = Failures(per_1000_devices_and_day=1.0, save_s=2.0)
    found = failures.lost_s_per_day(4_000, interval_s=600.0, pause_s=20.0)
    assert found == pytest.approx(DAY_S / 600 * 2 + 4 * (300 + 20))
    assert failures.lost_s_per_day(10**9, 600.0, 20.0) == DAY_S  # no more than the day


def test_pauses_are_those_that_were_measured() -> None:
    rows = json.loads((ROOT / "docs/results/data/engine-pauses-cpu.json").read_text())["rows"]
    medians = {row["name"]: row["value"] for row in rows}
    assert len(medians) == 5
    assert {pause.engine: pause.pause_s for pause in engine_pauses()} == medians
    assert statistics.fmean(medians.values()) > 1


def test_the_curve_goes_to_10_000_devices_and_the_best_interval_is_below() -> None:
    points = curve(3600.0, Failures(), engine_pauses()[0])
    assert (points[0][0], points[-1][0]) == (1, 10_000)
    assert all(best <= run for _, run, best in points)


def test_plan_compares_the_saves_of_the_recipe_with_the_best(tmp_path: Path) -> None:
    page = tmp_path / "plan.html"
    words = ["plan", "resnet50", "--devices", "64", "--batch-per-device", "256", "--set", "save.every=60min"]
    words += ["--failure-rate", "2", "--save-s", "3"]
    result = CliRunner().invoke(reconv, [*words, "--json", "--out", str(page)], catch_exceptions=False)
    (row,) = json.loads(result.output)["predictions"]
    expected = lost_time(64, 3600.0, Failures(2.0, 3.0), engine_pauses())
    assert row["failures"]["interval_s"] == 3600.0
    assert row["failures"]["failures_per_day"] == pytest.approx(0.128)
    assert row["failures"]["lost_s_per_day"] == expected.lost_s_per_day
    assert "Predicted percent of time that failures cost" in page.read_text()
    assert "A prediction, not a measurement" in page.read_text()
    text = CliRunner().invoke(reconv, words, catch_exceptions=False).output
    assert "lost in a day to failures" in text and "1 h 00 min" in text
    assert pytest.approx(0.4736, abs=1e-4) == FAILURES_PER_1000_DEVICES_AND_DAY


def test_a_recipe_without_saves_loses_no_time_that_is_known() -> None:
    words = ["plan", "resnet50", "--devices", "8,16384", "--batch-per-device", "256", "--set", "save.every=off"]
    done = CliRunner().invoke(reconv, words, env={"COLUMNS": "200"})
    assert done.exit_code == 0, done.output
    _, _, table = done.output.partition("lost in a day")
    assert re.search(r"only at the end +\S+ min \S+ s +\(\d", table), table
    (why,) = (line for line in done.output.splitlines() if "not possible" in line)
    assert "resnet50.yaml; --batch-per-device: batch.size: must be a number of at most" in why
