"""The report's section about a detector: precision-recall curves, object sizes, error kinds and classes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconv.logging import formatting as fmt
from reconv.report import page
from reconv.report.charts import Chart, Series, draw
from reconv.report.markup import Html, el
from reconv.report.run_record import RunRecord

_MAX_OPEN_ROWS = 25  # a longer table of classes is collapsed
_COLUMNS = {
    "num_objects": "objects",
    "num_detections": "detections",
    "recall": "recall",
    "ap": "AP",
    "ap50": "AP50",
    "voc10": "VOC AP",
}


def detection(record: RunRecord) -> Html:
    """The analysis of the last evaluation; empty for a run without one."""
    analysis = record.detection
    if analysis is None:
        return Html("")
    partial = ", a part of the validation set" if analysis["partial"] else ""
    intro = (
        f"Evaluation at step {analysis['step']:,} ({analysis['weights']} weights) on {analysis['num_images']:,} "
        f"images{partial}. An object counts as found at an IoU of 0.5 or more."
    )
    panels = (_curves(analysis), _f1_curve(analysis), _sizes(analysis), _errors(analysis))
    return page.section("Detection analysis", el("div", {"class": "charts"}, *panels), _classes(analysis), intro=intro)


def _curves(analysis: Mapping[str, Any]) -> Html:
    series = []
    for number, curve in enumerate(analysis["curves"]):
        last = len(curve["precision"]) - 1
        points = tuple((place / last, value) for place, value in enumerate(curve["precision"]))
        series.append(Series(curve["name"], points, number, dash=0 if number == 0 else 1))
    num_with_objects = sum(row["num_objects"] > 0 for row in analysis["classes"])
    which = " Classes: the best and the worst." if len(series) - 1 < num_with_objects else ""
    note = f"Interpolated precision at IoU 0.5: the best at or above each recall.{which}"
    chart = Chart(
        "Precision-recall", "percent", tuple(series), x_max=1.0, note=note, x_name="recall", y_range=(0.0, 1.0)
    )
    return draw(chart)


def _f1_curve(analysis: Mapping[str, Any]) -> Html:
    """Precision, recall and F1 over the score threshold, and the threshold with the highest F1."""
    curve, best = analysis["f1_curve"], analysis["best_threshold"]
    names = ("f1", "precision", "recall")
    series = tuple(
        Series("F1" if name == "f1" else name, tuple(zip(curve["score"], curve[name], strict=True)), color, color)
        for color, name in enumerate(names)
    )
    note = (
        f"Means over classes of the detections with at least a score. F1 is highest, {fmt.percent(best['f1'], 1)}, at "
        f"{best['score']:.2f} (precision {fmt.percent(best['precision'], 1)}, recall {fmt.percent(best['recall'], 1)}):"
        f" reconv predict --min-score {best['score']:.2f}"
    )
    chart = Chart(
        "F1 by confidence",
        "percent",
        series,
        x_max=1.0,
        note=note,
        best=(best["score"], best["f1"]),
        x_name="score",
        y_range=(0.0, 1.0),
    )
    return draw(chart)


def _errors(analysis: Mapping[str, Any]) -> Html:
    errors: Mapping[str, int] = analysis["errors"]
    examined = sum(number for name, number in errors.items() if name != "missed")
    objects = sum(row["num_objects"] for row in analysis["classes"])
    rows = [
        [
            name,
            f"{number:,}",
            _percent_of(number, objects if name == "missed" else examined),
            analysis["error_kinds"][name],
        ]
        for name, number in errors.items()
    ]
    note = (
        f"Of each class, as many of the best-scored detections are examined as it has objects: {examined:,} in total. "
        f"Percentages are of these; for missed objects, of the {objects:,} objects."
    )
    table = page.table(["kind", "count", "percent", "definition"], rows, (1, 2), "Error kinds")
    return page.panel("Error kinds", note, table)


def _sizes(analysis: Mapping[str, Any]) -> Html:
    metrics: Mapping[str, float] = analysis["metrics"]
    rows = [
        [
            size["name"],
            f"{size['num_objects']:,}",
            _percent_of(size["num_found"], size["num_objects"]),
            fmt.percent(metrics.get(f"ap_{size['name']}")),
        ]
        for size in analysis["sizes"]
    ]
    note = "By area in pixels of the original image: below 32 x 32, up to 96 x 96, and above, as in COCO."
    table = page.table(["size", "objects", "recall", fmt.metric_name("ap")], rows, (1, 2, 3), "Object sizes")
    return page.panel("Object sizes", note, table)


def _classes(analysis: Mapping[str, Any]) -> Html:
    """Every class, the one with the most objects first."""
    classes = sorted(analysis["classes"], key=lambda row: -row["num_objects"])
    columns = [name for name in _COLUMNS if name in classes[0]]
    rows = [[row["name"], *(_cell(row, name) for name in columns)] for row in classes]
    head = ["class", *(_COLUMNS[name] for name in columns)]
    table = page.table(head, rows, range(1, len(head)), "Classes", is_sortable=True)
    return page.fold(f"Classes: {len(rows):,}", table, is_open=len(rows) <= _MAX_OPEN_ROWS)


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name.startswith("num_"):
        return f"{row[name]:,}"
    return fmt.percent(row[name]) if row["num_objects"] else "no objects" if name == "recall" else "–"


def _percent_of(number: int, total: int) -> str:
    return fmt.percent(number / total, 1) if total else "–"
