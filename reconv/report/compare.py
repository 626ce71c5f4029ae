"""The report of several runs: their verdicts, their curves over each other, and how their recipes differ.

Owns the content of the comparison. Refuses to know its look. Invariant: a pure function of the run folders, which it
keeps in the order given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconv.logging import formatting as fmt
from reconv.report import page
from reconv.report.charts import NUM_COLOURS, draw
from reconv.report.curves import charts_of_runs
from reconv.report.markup import Html, el
from reconv.report.run_record import RunRecord
from reconv.report.sections import chart_grid, flat, moment, scalar

_ABSENT = "–"


def comparison(records: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> str:
    """The page that compares runs."""
    names = " and ".join(dict.fromkeys(record.name for record in records))
    charts = charts_of_runs(records, summaries)
    intro = "By epoch. Point at a curve, or focus it and use the arrow keys, for values; a name hides its line."
    return page.document(
        f"{len(records)} runs of {names} · Reconv",
        el(
            "main",
            None,
            el(
                "header",
                None,
                el("p", {"class": "kicker"}, "Reconv comparison"),
                el("h1", None, f"{len(records)} runs of {names}"),
                el("ul", {"class": "verdicts"}, *map(_verdict, range(len(records)), records, summaries)),
            ),
            page.section("Results", _results(records, summaries)),
            page.section("Curves", chart_grid([draw(c) for c in charts], [c.small for c in charts]), intro=intro),
            page.section("How the recipes differ", _differences(records)),
        ),
    )


def _verdict(number: int, record: RunRecord, summary: Mapping[str, Any]) -> Html:
    swatch = el("span", {"class": f"swatch c{number % NUM_COLOURS}", "aria-hidden": "true"})
    return el(
        "li",
        None,
        swatch,
        el("b", None, record.label),
        page.badge(fmt.state(summary)),
        el("span", None, fmt.verdict(summary)),
    )


def _results(records: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> Html:
    """One row a run."""
    rows = [
        [
            record.label,
            f"{fmt.metric_name(s['metric'])} {fmt.metric_text(s['metric'], s['value'])}" if s["metric"] else _ABSENT,
            fmt.metric_text(s["metric"], s["best"]) if s["metric"] else _ABSENT,
            f"{s['steps']:,} of {s['total_steps']:,}",
            fmt.duration(s["wall_s"]),
            fmt.rate(s["images_per_s"]),
            fmt.rate(s["compute_images_per_s"]),
            fmt.percent(s["data_wait_fraction"], 1),
            fmt.size(s["peak_memory_bytes"]),
            fmt.big(s["num_parameters"]) if s["num_parameters"] else _ABSENT,
            str(s["attempts"]),
            _started(record),
        ]
        for record, s in zip(records, summaries, strict=True)
    ]
    head = ["run", "result", "best", "steps", "time", "images/s", "without waits", "data wait", "memory", "parameters"]
    return page.table([*head, "attempts", "started"], rows, range(1, 11))


def _differences(records: Sequence[RunRecord]) -> Html:
    """The recipe fields whose values are not the same in every run."""
    recipes = [flat(record.recipe) for record in records]
    fields = sorted({name for recipe in recipes for name in recipe})
    rows = []
    for name in fields:
        values = [scalar(recipe[name]) if name in recipe else _ABSENT for recipe in recipes]
        if len(set(values)) > 1:
            rows.append([name, *values])
    if not rows:
        return el("p", None, "They do not: every field is the same.")
    return page.table(["field", *(record.label for record in records)], rows, (), "Recipe fields that differ")


def _started(record: RunRecord) -> str:
    time_s = record.attempts[0].start.time_s if record.attempts else None
    return _ABSENT if time_s is None else moment(time_s)
