"""The section on where the time of a run went."""

from __future__ import annotations

from pathlib import Path

from reconv.logging.event_log import EventLog
from reconv.logging.events import AttemptStarted, RunEnded
from reconv.report.html import render
from reconv.report.summary import summarize

FIRST = {"imports": 2.0, "plan": 0.5, "first_step": 1.5, "training": 6.0}
SECOND = {"imports": 1.0, "training": 90.0, "data_wait": 9.0}


def write_attempts(run: Path, *phases: dict[str, float]) -> Path:
    run.mkdir()
    with EventLog(run / "events.jsonl") as log:
        for number, seconds in enumerate(phases, start=1):
            log.write(AttemptStarted(number, 0, ("reconv", "train", "quickstart"), {}))
            log.write(RunEnded(5, 0, "finished", 1.0, 10, 0, startup_s=4.0, phases=seconds))
    return run


def test_each_attempt_is_a_bar_and_the_last_one_a_table(tmp_path: Path) -> None:
    page = render([write_attempts(tmp_path / "run", FIRST, SECOND)])
    assert "attempt 1: imports 20.0 %, plan 5.0 %, first step 15.0 %, training 60.0 %, data wait 0.0 %" in page
    assert "attempt 2: imports 1.0 %, plan 0.0 %, first step 0.0 %, training 90.0 %, data wait 9.0 %" in page
    cells = '<td>data wait</td><td class="num">9.00 s</td><td class="num">9.0 %</td>'
    assert cells in page and "<caption>Attempt 2</caption>" in page
    assert '<td>total</td><td class="num">1 min 40 s</td>' in page


def test_the_summary_has_the_phases_of_the_last_attempt(tmp_path: Path) -> None:
    summary = summarize(write_attempts(tmp_path / "run", FIRST, SECOND))
    assert (summary["phases_s"], summary["startup_s"]) == (SECOND, 4.0)


def test_runs_without_phases_have_no_such_section(tmp_path: Path) -> None:
    run = write_attempts(tmp_path / "run", {})
    assert "Where the time went" not in render([run])
    assert summarize(run)["phases_s"] == {}


def test_times_that_cannot_be_drawn_and_unknown_phases_are_left_out(tmp_path: Path) -> None:
    broken = {"imports": float("nan"), "plan": -1.0, "model": float("inf"), "<b>": 3.0, "training": 2.0}
    page = render([write_attempts(tmp_path / "run", broken)])
    assert "attempt 1: training 100.0 %" in page
    assert "nan" not in page.partition("Where the time went")[2].partition("</section>")[0].lower()
