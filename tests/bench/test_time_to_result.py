"""`benchmarks.training.time_to_result`: a whole process as phases."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.training.time_to_result import TimedProcess, describe, time_process
from reconv.logging.phases import Phase


def test_medians_are_printed_with_their_spread() -> None:
    timed = [
        TimedProcess(wall, wall, None, wall - 0.1, 0.1, {"imports": 1.0, "exit": wall - 1.0})
        for wall in (4.0, 2.0, 3.0)
    ]
    lines = describe(timed)
    assert len(lines) == len(Phase) + 1 + 6
    assert lines[0].split()[:2] == ["imports", "1.00"] and lines[len(Phase)].split()[:2] == ["exit", "2.00"]
    assert "  whole process: 3.00 s (2.00 to 4.00)" in lines
    assert "  process start to first step: not measured" in lines


@pytest.mark.slow
def test_the_phases_of_a_process_add_up_to_its_wall_clock(tmp_path: Path) -> None:
    train = ["quickstart", "--set", "length=3step", "--set", "data.subset_percent=10", "--quiet"]
    timed = time_process(train, tmp_path / "run")
    assert sum(timed.phases_s.values()) == pytest.approx(timed.wall_s, abs=1e-6)
    assert min(timed.phases_s.values()) >= 0
    assert timed.startup_s is not None
    assert timed.phases_s["imports"] < timed.startup_s < timed.wall_s
    assert 0 < timed.after_last_step_s < timed.wall_s
    assert timed.last_step_s + timed.after_last_step_s == pytest.approx(timed.wall_s)


@pytest.mark.slow
def test_a_run_that_fails_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="has ended with code"):
        time_process(["no-such-recipe"], tmp_path / "run")
