"""The page of a plan: scaling, where the time goes, and the numbers. It loads nothing from the network."""

from __future__ import annotations

from collections.abc import Sequence

from reconv.logging.formatting import duration, rate, size
from reconv.planner.cluster import RANGE, Cluster, ClusterPrediction, ImpossiblePlan
from reconv.planner.failures import LARGEST, Failures, curve, engine_pauses, lost_time
from reconv.planner.model import PARTS
from reconv.planner.step_time import StepTime
from reconv.recipe.schema import Recipe
from reconv.report import page
from reconv.report.bars import StackedBar, draw_stacked_bars
from reconv.report.charts import Chart, Series, draw
from reconv.report.markup import Html, el

LOST_HEAD = ("devices", "failures a day", "saves every", "best", *(pause.engine for pause in engine_pauses()))
HEAD = ("devices", "batch each", "images/s", "from", "to", "efficiency", "input", "time", "cost")


def render_plan(
    recipe: Recipe,
    cluster: Cluster,
    step_time: StepTime,
    rows: Sequence[ClusterPrediction | ImpossiblePlan],
    command: str,
    failures: Failures,
) -> str:
    """The HTML page."""
    found = [row for row in rows if isinstance(row, ClusterPrediction)]
    impossible = [row for row in rows if isinstance(row, ImpossiblePlan)]
    title = f"{recipe.name} on {cluster.kind.name}"
    notes = [f"{row.devices:,} devices: {note}" for row in found for note in row.notes]
    notes += [f"{row.devices:,} devices: not possible: {row.why}" for row in impossible]
    return page.document(
        f"{title} · Reconv plan",
        page.header(
            "Reconv plan: predicted, not measured",
            title,
            el("p", {"class": "about"}, f"{recipe.model.name} in {recipe.precision.mode}, {recipe.length}"),
            page.command("again", command),
        ),
        page.section("Scaling", _charts(found, step_time)),
        page.section(
            "Predictions", page.table(HEAD, [plan_cells(row) for row in found], range(9)) if found else Html("")
        ),
        page.section("Failures: time lost in a day", _failures(found, failures)),
        page.section(
            "Notes", el("ul", {"class": "notes"}, *(el("li", None, note) for note in notes)) if notes else Html("")
        ),
        page.section("What it is based on", page.pairs(assumptions(cluster, step_time, failures))),
    )


def _failures(rows: Sequence[ClusterPrediction], failures: Failures) -> Html:
    """Cost of lost devices on the planned clusters, and on up to 10,000 devices."""
    pauses = engine_pauses()
    if not rows or not pauses:
        return Html("")
    interval_s, worst = rows[-1].save_interval_s, max(pauses, key=lambda pause: pause.pause_s)
    points = curve(interval_s, failures, worst)
    every = "the best interval" if interval_s is None else f"saves every {duration(interval_s)}"
    chart = Chart(
        "Predicted percent of time that failures cost",
        "percent",
        (
            Series(every, tuple((devices, run / 100) for devices, run, _ in points), 0),
            Series("the best interval", tuple((devices, best / 100) for devices, _, best in points), 1, 2),
        ),
        LARGEST,
        note=f"A prediction, not a measurement. With the longest pause: {worst.engine}, {worst.pause_s:.3g} s.",
        from_zero=True,
        x_name="devices",
    )
    table = page.table(LOST_HEAD, [lost_cells(row, failures) for row in rows], range(len(LOST_HEAD)))
    return el("div", None, el("div", {"class": "charts"}, draw(chart)), table)


def lost_cells(row: ClusterPrediction, failures: Failures) -> tuple[str, ...]:
    """A row of the table of lost time: by engine, with the recipe's saves, if any, and with the best interval."""
    found = lost_time(row.devices, row.save_interval_s, failures, engine_pauses())
    lost = ((s, found.best_lost_s_per_day[engine]) for engine, s in found.lost_s_per_day.items())
    return (
        f"{row.devices:,}",
        f"{found.failures_per_day:.3g}",
        "only at the end" if found.interval_s is None else duration(found.interval_s),
        duration(found.best_interval_s),
        *(
            f"{'' if found.interval_s is None else duration(run_s)} ({duration(best_s)})".strip()
            for run_s, best_s in lost
        ),
    )


def _charts(rows: Sequence[ClusterPrediction], step_time: StepTime) -> Html:
    if not rows:
        return Html("")
    most = max(row.devices for row in rows)

    def line(label: str, values: Sequence[float], color: int, dash: int = 0) -> Series:
        points = tuple((float(row.devices), value / 1000) for row, value in zip(rows, values, strict=True))
        return Series(label, points, color, dash, dots=dash == 0)

    perfect = Series("perfect", ((0.0, 0.0), (float(most), most * step_time.images_per_s / 1000)), 7, 1)
    speed = Chart(
        "Thousand images per second",
        "number",
        (
            line("predicted", [row.images_per_s for row in rows], 0),
            line("from", [row.images_per_s_range[0] for row in rows], 0, 2),
            line("to", [row.images_per_s_range[1] for row in rows], 0, 2),
            perfect,
        ),
        most,
        note="Dashed: as many single devices at their best batch.",
        from_zero=True,
        x_name="devices",
    )
    bars = [
        StackedBar(f"{row.devices:,}", f"{1000 * row.step.step_s:.3g} ms", tuple(row.step.parts_s.values()))
        for row in rows
    ]
    where = draw_stacked_bars("Where the time of a step goes", "By number of devices.", PARTS, bars)
    return el("div", {"class": "charts"}, draw(speed), where)


def plan_cells(row: ClusterPrediction) -> tuple[str, ...]:
    """A row of the table, on the console and on the page."""
    return (
        f"{row.devices:,}",
        f"{row.batch_per_device:,}",
        rate(row.images_per_s),
        rate(row.images_per_s_range[0]),
        rate(row.images_per_s_range[1]),
        f"{100 * row.efficiency:.0f} %",
        f"{size(row.input_bytes_per_s)}/s" if row.input_bytes_per_s else "-",
        duration(3600 * row.hours),
        "-" if row.cost is None else f"${row.cost:,.0f}",
    )


def assumptions(cluster: Cluster, step_time: StepTime, failures: Failures) -> list[tuple[str, str]]:
    """Assumptions of the predictions."""
    kind = cluster.kind
    decoded = cluster.input_limits(True).images_per_s_per_node or 0.0
    if cluster.price_per_hour is None:
        price = "not known: --price gives a cost"
    else:
        is_given = cluster.price_per_hour != kind.price_per_hour
        price = f"${cluster.price_per_hour:g} per hour and device, {'as given' if is_given else kind.price_source}"
    storage = "without a limit" if cluster.storage_bytes_per_s is None else f"{size(cluster.storage_bytes_per_s)}/s"
    peak = "" if kind.peak_tflops is None else f"{kind.peak_tflops:g} TFLOP/s in half precision and "
    images = f"{rate(step_time.images_per_s)} images/s at batch {step_time.largest_batch}"
    within, between = kind.link.bytes_per_s / 1e9, 8 * kind.network.bytes_per_s / 1e9
    own = f", and {100 * step_time.uncertainty:.0f} % for the step time" if step_time.uncertainty else ""
    return [
        ("one device", f"{images} ({step_time.source})"),
        (
            "device",
            f"{kind.description}: {peak}{kind.memory_gb_per_s:,g} GB/s of memory; {kind.devices_per_node} a machine",
        ),
        (
            "links",
            f"{within:g} GB/s within a machine, {between:g} Gbit/s and {1e6 * kind.network.latency_s:g} µs between",
        ),
        (
            "input",
            f"{rate(decoded)} images/s decoded per machine, {cluster.image_bytes / 1000:g} kB each, storage {storage}",
        ),
        ("price", price),
        (
            "failures",
            f"{failures.per_1000_devices_and_day:.3g} of 1,000 devices a day (Llama 3: 419 in 54 days on 16,384 GPUs), "
            f"{failures.save_s:.3g} s per save; pauses of the engines as measured on CPUs, a prediction beyond that",
        ),
        ("range", f"{RANGE[0]:g} to {RANGE[1]:g} times, as 80 % of the published results held out of the fit{own}"),
    ]
