"""The report that compares several runs: results, curves in the same charts, and differing recipe fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from reconv.logging import formatting as fmt
from reconv.recipe.load.identity import may_change
from reconv.report import page
from reconv.report.charts import NUM_COLORS, draw
from reconv.report.curves import charts_of_runs
from reconv.report.markup import Html, el, join
from reconv.report.run_record import RunRecord
from reconv.report.sections import chart_grid, flat, scalar, utc_time

_ABSENT = "–"
_WHERE_FROM = ("expect", "published", "measured", "derive")  # a figure or rule, and no setting


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
    """The recipe fields that determine the result and differ; the others that differ are folded."""
    recipes = [_with_defaults(record.recipe) for record in records]
    rows: dict[bool, list[list[str]]] = {True: [], False: []}
    for name in sorted({name for recipe in recipes for name in recipe}):
        values = [scalar(recipe[name]) if name in recipe else _ABSENT for recipe in recipes]
        if len(set(values)) > 1:
            rows[may_change(name) or name.startswith(_WHERE_FROM)].append([name, *values])
    head = ["field", *(record.label for record in records)]
    shown = page.table(head, rows[False], (), "Recipe fields that differ")
    if not rows[False]:
        shown = el("p", None, "All fields that determine the result are equal.")
    if not rows[True]:
        return shown
    hidden = page.table(head, rows[True], (), "Fields that do not determine the result")
    return join([shown, page.fold(f"Fields that do not determine the result: {len(rows[True])}", hidden)])


def _with_defaults(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """A recipe's fields; one that an earlier version did not have is at its default."""
    from reconv.recipe.schema import Recipe

    return flat(Recipe().model_dump(mode="json")) | flat(recipe)


def _started(record: RunRecord) -> str:
    time_s = record.attempts[0].start.time_s if record.attempts else None
    return _ABSENT if time_s is None else utc_time(time_s)
