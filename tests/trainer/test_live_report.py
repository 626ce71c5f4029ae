"""The report while a run is running: rewritten after evaluations, and never the reason why a run ends."""

from __future__ import annotations

from pathlib import Path

import pytest

import reconv
from reconv.core.errors import ExitCode
from reconv.logging.event_log import read_events
from reconv.logging.events import CheckpointSaved, Event, LogMessage, RunPlanned, TrainProgress
from reconv.trainer.callbacks import live_report
from reconv.trainer.callbacks.live_report import live_page

SHORT = [("length", "2ep", "test"), ("data.subset_percent", "10", "test"), ("save.every", "1ep", "test")]


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rewrite the report at every evaluation, however fast they follow each other."""
    monkeypatch.setattr(live_report, "MIN_INTERVAL_S", 0.0)
    monkeypatch.setattr(live_report, "MAX_SHARE", 1e9)


@pytest.mark.usefixtures("always")
def test_the_report_is_live_from_the_first_step_to_the_end_of_the_run() -> None:
    run = Path("run")
    pages: list[str] = []

    def look(event: Event) -> None:
        if isinstance(event, TrainProgress):
            pages.append((run / "report.html").read_text())

    result = reconv.train("quickstart", out=run, overrides=[*SHORT, ("log.every", "1step", "test")], on_event=look)
    assert len(pages) == 4
    assert all("data-reload-s" in page and "running</span>" in page for page in pages)
    has_analysis = ["Evaluation at step 2 (raw weights)" in page for page in pages]
    assert has_analysis == [False, False, True, True]  # there is an evaluation after two steps
    last = (run / "report.html").read_text()
    assert "data-reload-s" not in last
    assert result.exit_code == ExitCode.OK


@pytest.mark.usefixtures("always")
def test_a_report_that_cannot_be_written_is_a_warning() -> None:
    report = Path("run") / "report.html"

    def block(event: Event) -> None:
        if isinstance(event, RunPlanned):
            report.mkdir()
        elif isinstance(event, CheckpointSaved) and event.reason == "end":
            report.rmdir()

    result = reconv.train("quickstart", out="run", overrides=SHORT, on_event=block)
    assert result.exit_code == ExitCode.OK
    assert report.is_file()
    events = read_events(Path("run") / "events.jsonl")
    warnings = [event.text for event in events if isinstance(event, LogMessage) and event.level == "warning"]
    assert len(warnings) == 1  # not one for each evaluation
    assert warnings[0].startswith("the report could not be written: ")


def test_evaluations_in_quick_succession_write_no_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_report, "MIN_INTERVAL_S", 3600.0)
    pages: set[str] = set()

    def look(event: Event) -> None:
        if isinstance(event, CheckpointSaved):
            pages.add((Path("run") / "report.html").read_text())

    reconv.train("quickstart", out="run", overrides=SHORT, on_event=look)
    assert len(pages) == 1  # that of the start


def test_a_page_reloads_more_often_than_it_changes_and_not_for_ever() -> None:
    assert live_page(1000.0, None).reload_s == 5
    often, seldom = live_page(1000.0, 12.0), live_page(1000.0, 7200.0)
    assert often.reload_s == 5
    assert live_page(1000.0, 100.0).reload_s == 25
    assert seldom.reload_s == 60
    assert seldom.stale_s > 7200 > often.stale_s > 12
