"""The charts of a report, for one run or several. A chart without finite values is omitted."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from reconv.logging import formatting as fmt
from reconv.logging.events import TrainProgress
from reconv.report.charts import NUM_COLORS, Band, Chart, Mark, Series
from reconv.report.run_record import RunRecord

Lines = tuple[Series, ...]
_DATA_WAIT_TITLE = "Data wait, share of training time"
_MIN_CLOSE_UP_POINTS = 8
_TRAIN, _RAW, _EMA = 0, 1, 2  # colors of the page's palette
_WEIGHTS = {"raw": ("validation", _RAW, 0), "ema": ("validation, EMA", _EMA, 1)}


def charts_of_run(record: RunRecord, summary: Mapping[str, Any]) -> list[Chart]:
    """The charts of one run, the most important first."""
    plan, metric = record.plan, summary["metric"]
    chart = partial(
        Chart,
        x_max=record.epoch(plan.total_steps) if plan else 0.0,
        marks=_marks(record),
        steps_per_epoch=plan.steps_per_epoch if plan else None,
    )
    small = partial(chart, small=True)
    seen = {name for e in record.evaluations for name in e.metrics} - {metric, "loss"}
    others = sorted(fmt.shown_metrics(seen))
    gradient = _train(record, "gradient norm", lambda e: e.grad_norm)
    charts = [
        chart(
            "Loss",
            "number",
            _train_and_validation(record, "loss"),
            may_be_log=True,
            note=f"{plan.loss_note[0].upper()}{plan.loss_note[1:]}." if plan and plan.loss_note else "",
        ),
        *(_result_charts(record, summary) if metric not in (None, "loss") else []),
        *(small(_title(name), _unit(record, name), _train_and_validation(record, name)) for name in others),
        small("AP by object size", "percent", _by_size(record, summary["weights"] or "raw")),
        small("Learning rate", "number", _train(record, "learning rate", lambda e: e.lr), from_zero=True),
        small("Throughput, images/s", "count", _throughput(record), from_zero=True),
        small(_DATA_WAIT_TITLE, "percent", _train(record, "data wait", lambda e: e.data_wait_fraction), from_zero=True),
        small("Gradient norm", "number", gradient, may_be_log=True),
        *(
            small(f"{_title(name)}, every checkpoint", _unit(record, name), _checkpoint_scores(record, name))
            for name in ([metric] if metric not in (None, "loss") else [])
        ),
        *(small(name, "number", _scalar(record, name)) for name in dict.fromkeys(e.name for e in record.scalars)),
        small("Loss scale", "number", _train(record, "loss scale", lambda e: e.loss_scale), may_be_log=True),
    ]
    return [c for c in charts if _has_values(c)]


def charts_of_runs(records: Sequence[RunRecord], summaries: Sequence[Mapping[str, Any]]) -> list[Chart]:
    """The charts of several runs, with a line for each run."""
    chart = partial(Chart, x_max=max((r.epoch(r.plan.total_steps) for r in records if r.plan), default=0.0))
    small = partial(chart, small=True)
    metrics = sorted({s["metric"] for s in summaries if s["metric"] not in (None, "loss")})

    def training(value: Callable[[TrainProgress], float | None]) -> Lines:
        return tuple(line for n, r in enumerate(records) for line in _train(r, r.label, value, n, n // NUM_COLORS))

    def validation(metric: str) -> Lines:
        return tuple(
            line
            for n, record in enumerate(records)
            for weights, suffix, dash in (("raw", "", 0), ("ema", " (EMA)", 1))
            for line in _validation(record, metric, weights, f"{record.label}{suffix}", n, dash)
        )

    judged = [chart(f"Validation {fmt.metric_name(m)}", _unit(records[0], m), validation(m)) for m in metrics]
    charts = [
        chart("Training loss", "number", training(lambda e: e.loss), may_be_log=True),
        *judged,
        *(close_up for whole in judged for close_up in _close_up(whole)),
        small("Validation loss", "number", validation("loss"), may_be_log=True),
        small("Learning rate", "number", training(lambda e: e.lr), from_zero=True),
        small("Throughput, images/s", "count", training(lambda e: e.images_per_s), from_zero=True),
        small(_DATA_WAIT_TITLE, "percent", training(lambda e: e.data_wait_fraction), from_zero=True),
        small("Gradient norm", "number", training(lambda e: e.grad_norm), may_be_log=True),
    ]
    return [c for c in charts if _has_values(c)]


def _result_charts(record: RunRecord, summary: Mapping[str, Any]) -> list[Chart]:
    """The metric of the result, with the expected value and the best evaluation; then a close-up."""
    metric, expect, plan = summary["metric"], summary["expect"], record.plan
    notes = sorted({e.metrics_note for e in record.progress if e.metrics_note})
    is_expected = expect and expect["metric"] == metric
    whole = Chart(
        _title(metric),
        _unit(record, metric),
        _train_and_validation(record, metric),
        x_max=record.epoch(plan.total_steps) if plan else 0.0,
        note=f"Training values are {'; '.join(notes)} and not comparable with validation." if notes else "",
        marks=_marks(record),
        band=Band(expect["value"], expect["tolerance"], f"expected {fmt.expectation(expect)} %")
        if is_expected
        else None,
        best=None if summary["best"] is None else (record.epoch(summary["best_step"]), summary["best"]),
        steps_per_epoch=plan.steps_per_epoch if plan else None,
    )
    return [whole, *_close_up(whole)]


def _close_up(whole: Chart) -> list[Chart]:
    """The end of the validation curve, enlarged, if it looks flat in the whole chart."""
    lines = tuple(series for series in whole.series if series.dots)
    points = sorted((x, y) for series in lines for x, y in series.points if math.isfinite(y))
    if len(points) < _MIN_CLOSE_UP_POINTS:
        return []
    late = [y for _, y in points[len(points) // 2 :]]
    level = [whole.band.value - whole.band.tolerance, whole.band.value + whole.band.tolerance] if whole.band else []
    low, high = min(late + level), min(1.0, max(late + level)) if whole.format == "percent" else max(late + level)
    margin = max(high - low, 0.002) * 0.1
    if high - low > 0.25 * (max(y for _, y in points) - min(y for _, y in points)):
        return []
    y_range = (low - margin, min(1.0, high + margin) if whole.format == "percent" else high + margin)
    return [replace(whole, title=f"{whole.title}, close up", series=lines, note="", y_range=y_range, small=True)]


def _title(metric: str) -> str:
    return f"Accuracy, {fmt.metric_name(metric)}" if metric.startswith("top") else fmt.metric_name(metric)


def _unit(record: RunRecord, metric: str) -> str:
    """The unit of a metric's axis: percent, unless an evaluation has a value that is no fraction."""
    values = [e.metrics[metric] for e in record.evaluations if metric in e.metrics]
    return "percent" if all(fmt.is_fraction(metric, value) for value in values) else "number"


def _train_and_validation(record: RunRecord, metric: str) -> Lines:
    notes = sorted({e.metrics_note for e in record.progress if e.metrics_note}) if metric != "loss" else []
    label = f"training, {'; '.join(notes)}" if notes else "training"

    def value(event: TrainProgress) -> float | None:
        return event.loss if metric == "loss" else event.metrics.get(metric)

    validations = [_validation(record, metric, weights, *look) for weights, look in _WEIGHTS.items()]
    return (*_train(record, label, value), *(line for lines in validations for line in lines))


def _by_size(record: RunRecord, weights: str) -> Lines:
    """A detector's precision for small, medium and large objects."""
    sizes = enumerate(("small", "medium", "large"))
    return tuple(line for n, size in sizes for line in _validation(record, f"ap_{size}", weights, size, n, n))


def _throughput(record: RunRecord) -> Lines:
    return (
        *_train(record, "with data wait", lambda e: e.images_per_s, _TRAIN),
        *_train(record, "without data wait", lambda e: e.compute_images_per_s, _EMA, 1),
    )


def _train(
    record: RunRecord, label: str, value: Callable[[TrainProgress], float | None], color: int = _TRAIN, dash: int = 0
) -> Lines:
    """The line of a value of the training events; none if no event has it."""
    values = [(e.epoch, value(e)) for e in record.progress]
    points = tuple((x, y) for x, y in values if y is not None)
    return (Series(label, points, color, dash),) if points else ()


def _validation(record: RunRecord, metric: str, weights: str, label: str, color: int, dash: int) -> Lines:
    """The line of a metric of one set of weights; none if it was not evaluated."""
    evaluations = [e for e in record.evaluations if e.weights == weights and metric in e.metrics]
    points = tuple((e.epoch, e.metrics[metric]) for e in evaluations)
    return (Series(label, points, color, dash, dots=True),) if points else ()


def _scalar(record: RunRecord, name: str) -> Lines:
    """The line of a value that a callback has logged."""
    points = tuple((record.epoch(e.step), e.value) for e in record.scalars if e.name == name)
    return (Series(name, points, _TRAIN),)


def _checkpoint_scores(record: RunRecord, metric: str) -> Lines:
    """The line of a metric over the checkpoints of `reconv eval --all`."""
    points = tuple((record.epoch(s.step), s.metrics[metric]) for s in record.scores if metric in s.metrics)
    return (Series("reconv eval --all", points, _RAW, dots=True),) if points else ()


def _marks(record: RunRecord) -> tuple[Mark, ...]:
    resumes = [
        Mark(
            record.epoch(t.start.from_step),
            "resume",
            f"attempt {t.start.attempt} resumed from step {t.start.from_step:,}",
        )
        for t in record.attempts
        if t.start.from_step > 0
    ]
    broken = [
        Mark(record.epoch(e.step), "nonfinite", f"step {e.step:,}: non-finite loss or gradient; action: {e.action}")
        for e in record.non_finite[:200]
    ]
    return (*resumes, *broken)


def _has_values(chart: Chart) -> bool:
    return any(math.isfinite(y) for series in chart.series for _, y in series.points)
