"""The report that compares several runs: results, curves in the same charts, and differing recipe fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconv.logging import formatting as fmt
from reconv.report import page
from reconv.report.charts import NUM_COLORS, draw
from reconv.report.curves import charts_of_runs
from reconv.report.markup import Html, el
from reconv.report.run_record import RunRecord
from reconv.report.sections import chart_grid, flat, scalar, utc_time

_ABSENT = "–"


def comparison(records: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> str:
    """The page that compares runs."""
    names = " and ".join(dict.fromkeys(record.name for record in records))
    charts = charts_of_runs(records, summaries)
    intro = (
        "By epoch. Hover over a chart, or focus it and use the arrow keys, for values; click a name to hide its line."
    )
    return page.document(
        f"{len(records)} runs of {names} · Reconv",
        page.header(
            "Reconv comparison",
            f"{len(records)} runs of {names}",
            el("ul", {"class": "verdicts"}, *map(_verdict, range(len(records)), records, summaries)),
        ),
        page.section("Results", _results(records, summaries)),
        page.section("Curves", chart_grid([draw(c) for c in charts], [c.small for c in charts]), intro=intro),
        page.section("Recipe differences", _differences(records)),
    )


def _verdict(number: int, record: RunRecord, summary: Mapping[str, Any]) -> Html:
    swatch = el("span", {"class": f"swatch c{number % NUM_COLORS}", "aria-hidden": "true"})
    return el(
        "li",
        None,
        swatch,
        el("b", None, record.label),
        page.badge(fmt.state(summary)),
        el("span", None, " ".join([fmt.verdict(summary), *(f"{problem}." for problem in record.problems)])),
    )


def _results(records: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> Html:
    """One row per run."""
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
            fmt.short_count(s["num_parameters"]) if s["num_parameters"] else _ABSENT,
            str(s["attempts"]),
            _started(record),
        ]
        for record, s in zip(records, summaries, strict=True)
    ]
    head = [
        "run",
        "result",
        "best",
        "steps",
        "time",
        "images/s",
        "without data wait",
        "data wait",
        "memory",
        "parameters",
    ]
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
        return el("p", None, "All fields are equal.")
    return page.table(["field", *(record.label for record in records)], rows, (), "Recipe fields that differ")


def _started(record: RunRecord) -> str:
    time_s = record.attempts[0].start.time_s if record.attempts else None
    return _ABSENT if time_s is None else utc_time(time_s)
