"""The report: one self-contained HTML page about a run, or a comparison of several.

The same run directories give the same bytes, and the page loads nothing from the network.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

from reconv.core.errors import UsageError
from reconv.report import page, sections
from reconv.report.classifier_section import classification
from reconv.report.compare import comparison
from reconv.report.detector_section import detection
from reconv.report.evaluation_files import CLASSIFICATION_FILE, DETECTION_FILE
from reconv.report.markup import Html, el
from reconv.report.published_section import published_figures
from reconv.report.run_record import RunRecord, load_run_record, with_distinct_labels
from reconv.report.summary import summarize_record
from reconv.report.time_section import time_by_phase
from reconv.storage.files import write_atomic


def render(
    run_dirs: Sequence[Path], live: page.LivePage | None = None, warn: Callable[[str], None] | None = None
) -> str:
    """The page: the report of one run directory, or the comparison of several.

    With `live`, the report is of a run that is running: it says so and reloads itself. `warn` is called with what could
    not be read.
    """
    if not run_dirs:
        raise UsageError("no run directory was given", hint="reconv report runs/RECIPE/1")
    records = [load_run_record(run_dir) for run_dir in run_dirs]
    if warn is not None:
        for record in records:
            for problem in record.problems:
                warn(f"{record.folder}: {problem}")
    if len(records) == 1:
        return _report(records[0], live)
    records = with_distinct_labels(records)
    return comparison(records, [summarize_record(record) for record in records])


def write_report(run_dir: Path, live: page.LivePage | None = None) -> Path:
    """Write `report.html` into the run directory and return its path."""
    path = run_dir / "report.html"
    write_atomic(path, render([run_dir], live))
    return path


def _analysis(section: Callable[[RunRecord], Html], record: RunRecord, name: str) -> Html:
    """A section of an analysis file; a notice where its content is not what this version writes."""
    try:
        return section(record)
    except (KeyError, TypeError, ValueError, AttributeError, IndexError, ArithmeticError):
        return el("p", {"class": "warning"}, f"{name} is damaged or of another version, and was left out.")


def _report(record: RunRecord, live: page.LivePage | None) -> str:
    summary = summarize_record(record)
    return page.document(
        f"{record.title} · Reconv report",
        sections.header(record, summary, live),
        sections.cards(record, summary),
        sections.curves(record, summary),
        _analysis(classification, record, CLASSIFICATION_FILE),
        _analysis(detection, record, DETECTION_FILE),
        sections.messages(record),
        sections.bad_images(record),
        sections.image_sections(record),
        time_by_phase(record),
        published_figures(record, summary),
        page.section(
            "Details",
            sections.attempts(record),
            sections.plan(record),
            sections.evaluations(record),
            sections.tables(record),
            sections.checkpoints(record),
            sections.environment(record),
            sections.recipe(record),
        ),
        live=live,
    )
