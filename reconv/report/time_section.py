"""The report's section on time: a bar for each attempt, and a table of the last one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reconv.logging import formatting as fmt
from reconv.logging.phases import Phase, phase_label
from reconv.report import page
from reconv.report.bars import StackedBar, draw_stacked_bars
from reconv.report.markup import Html, el
from reconv.report.run_record import RunRecord

_MAX_BARS = 12
_NOTE = (
    "From the start of the process to the end of the run, before this page was written. Saves are the time that "
    "training was blocked; evaluations include their wait for data."
)


def time_by_phase(record: RunRecord) -> Html:
    """The section; empty if no attempt has logged its phases."""
    attempts = [(t.start.attempt, _valid(t.end.phases)) for t in record.attempts if t.end is not None]
    timed = [(number, seconds) for number, seconds in attempts if sum(seconds.values()) > 0]
    if not timed:
        return Html("")
    names = [phase for phase in Phase if any(seconds.get(phase, 0.0) > 0 for _, seconds in timed)]
    bars = [
        StackedBar(
            f"attempt {number}", _seconds(sum(seconds.values())), tuple(seconds.get(name, 0.0) for name in names)
        )
        for number, seconds in timed[-_MAX_BARS:]
    ]
    labels = [phase_label(name) for name in names]
    figure = draw_stacked_bars("Time by phase", _NOTE, labels, bars)
    number, seconds = timed[-1]
    return page.section(
        "Where the time went", el("div", {"class": "stack"}, figure, _table(names, seconds, f"Attempt {number}"))
    )


def _valid(phases: Mapping[str, float]) -> dict[str, float]:
    """The known phases with a time that can be drawn; a damaged file may have others."""
    return {phase: phases[phase] for phase in Phase if 0 <= phases.get(phase, -1) < float("inf")}


def _table(names: Sequence[Phase], seconds: Mapping[str, float], caption: str) -> Html:
    total_s = sum(seconds.values())
    rows = [
        [phase_label(name), _seconds(seconds[name]), fmt.percent(seconds[name] / total_s, 1)]
        for name in names
        if name in seconds
    ]
    rows.append(["total", _seconds(total_s), ""])
    return page.table(["phase", "time", "of the total"], rows, (1, 2), caption)


def _seconds(seconds: float) -> str:
    """A time to a hundredth of a second, where that is not lost among minutes."""
    return f"{seconds:.2f} s" if seconds < 60 else fmt.duration(seconds)
