"""The report's section about a classifier: confusion matrix, confused pairs, calibration and classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from reconv.logging import formatting as fmt
from reconv.report import page
from reconv.report.charts import Chart, Series, draw
from reconv.report.markup import Html, el, join
from reconv.report.run_record import RunRecord

MAX_MATRIX_CLASSES = 30  # with more, cells and names are too small to read
MAX_OPEN_ROWS = 25  # a longer table of classes is collapsed
_MAX_COUNT_CLASSES = 15  # with more, counts are shown on hover only
_MAX_NAME_LETTERS = 16
_NUM_PAIRS, _NUM_PAIRS_BESIDE_MATRIX = 10, 6  # the matrix has them all
_MIN_MATRIX_PX = 480
_CELL_PX, _LETTER_PX = 34, 7
_COLUMNS = {"precision": "precision", "recall": "recall", "f1": "F1", "ap": "AP"}


def classification(record: RunRecord) -> Html:
    """The analysis of the last evaluation; empty for a run without one."""
    analysis = record.classification
    if analysis is None or not analysis["num_images"]:
        return Html("")
    partial = ", a part of the validation set" if analysis["partial"] else ""
    metrics = analysis["metrics"]
    intro = (
        f"Evaluation at step {analysis['step']:,} ({analysis['weights']} weights) on {analysis['num_images']:,} "
        f"images{partial}. Mean over classes: precision {fmt.percent(metrics['macro_precision'])}, recall "
        f"{fmt.percent(metrics['macro_recall'])}, F1 {fmt.percent(metrics['macro_f1'])}."
    )
    return page.section("Classification analysis", _panels(analysis), _classes(analysis), intro=intro)


def _panels(analysis: Mapping[str, Any]) -> Html:
    """Panels on confusions and calibration; empty for several labels per image."""
    if "confusion" not in analysis:
        return Html("")
    shows_matrix = len(analysis["classes"]) <= MAX_MATRIX_CLASSES
    num_pairs = _NUM_PAIRS_BESIDE_MATRIX if shows_matrix else _NUM_PAIRS
    panels = [_reliability(analysis), _pairs(analysis, num_pairs)]
    if shows_matrix:
        panels = [_matrix(analysis), el("div", {"class": "stack"}, *panels)]
    return el("div", {"class": "charts"}, *panels)


def _matrix(analysis: Mapping[str, Any]) -> Html:
    """The confusion matrix as a heat map: a row for each target class, a column for each predicted class."""
    names = [row["name"] for row in analysis["classes"]]
    side, count = _CELL_PX * len(names), len(names)
    longest = max(len(_short(name)) for name in names) * _LETTER_PX
    left, top = longest + 30, longest + 30
    cells = [_cell(analysis, names, left, top, *cell) for cell in _cells(analysis)]
    labels = []
    for number, name in enumerate(names):
        middle = number * _CELL_PX + _CELL_PX / 2
        title = el("title", None, name)
        row = {"x": left - 8, "y": top + middle, "dy": "0.35em", "text-anchor": "end"}
        column = {"transform": f"translate({left + middle} {top - 8}) rotate(-90)", "dy": "0.35em"}
        labels += [el("text", row, title, _short(name)), el("text", column, title, _short(name))]
    frame = el("rect", {"class": "frame", "x": left, "y": top, "width": side, "height": side})
    axes = [
        el("text", {"class": "axis-name", "x": left + side / 2, "y": 14, "text-anchor": "middle"}, "predicted"),
        el("text", {"class": "axis-name", "transform": f"translate(14 {top + side / 2}) rotate(-90)",
                    "text-anchor": "middle"}, "target"),
    ]  # fmt: skip
    wrong = analysis["num_images"] - sum(n for t, p, n in _cells(analysis) if t == p)
    width, height = left + side + 2, top + side + 2
    svg = el(
        "svg",
        {
            "viewBox": f"0 0 {width} {height}",
            "role": "img",
            "aria-label": f"Confusion matrix of {count} classes: {wrong:,} of {analysis['num_images']:,} images are "
            "wrong. The tables have the numbers.",
            "style": f"max-width: {max(width, _MIN_MATRIX_PX)}px",
        },
        frame,
        *cells,
        *labels,
        *axes,
    )
    note = "Images by target and predicted class; blue is correct, orange is wrong. Colors are by share of the row."
    caption = el("figcaption", None, el("h3", None, "Confusion matrix"), el("p", None, note))
    return el("figure", {"class": "panel matrix"}, caption, svg)


def _cells(analysis: Mapping[str, Any]) -> list[tuple[int, int, int]]:
    """Target, predicted class and number of images of each nonzero cell."""
    confusion = analysis["confusion"]
    return list(zip(confusion["target"], confusion["predicted"], confusion["count"], strict=True))


def _cell(
    analysis: Mapping[str, Any], names: Sequence[str], left: int, top: int, target: int, predicted: int, count: int
) -> Html:
    num_images = analysis["classes"][target]["num_images"]
    share = count / num_images
    opacity = 0.06 + 0.94 * math.sqrt(share)  # the root, so that few confused images are visible too
    x, y = left + predicted * _CELL_PX, top + target * _CELL_PX
    kind = "correct" if target == predicted else "wrong"
    outcome = "predicted as such" if target == predicted else f"predicted as {names[predicted]}"
    text = f"{names[target]}: {count:,} of {num_images:,} {outcome} ({fmt.percent(share, 1)})"
    box = {"x": x + 1, "y": y + 1, "width": _CELL_PX - 2, "height": _CELL_PX - 2, "fill-opacity": f"{opacity:.2f}"}
    number = {
        "x": x + _CELL_PX / 2,
        "y": y + _CELL_PX / 2,
        "dy": "0.35em",
        "text-anchor": "middle",
        "class": "on-dark" if opacity > 0.6 else "on-light",
    }
    shown = [el("text", number, _short_count(count))] if len(names) <= _MAX_COUNT_CLASSES else []
    return el("g", {"class": kind}, el("title", None, text), el("rect", box), *shown)


def _short(name: str) -> str:
    return name if len(name) <= _MAX_NAME_LETTERS else f"{name[: _MAX_NAME_LETTERS - 1]}…"


def _short_count(count: int) -> str:
    """A count of at most four letters."""
    return str(count) if count < 10_000 else f"{count // 1000}k"


def _pairs(analysis: Mapping[str, Any], count: int) -> Html:
    """The pairs of classes that are confused most often."""
    num_images = {row["name"]: row["num_images"] for row in analysis["classes"]}
    rows = [
        [
            pair["target"],
            pair["predicted"],
            f"{pair['num_images']:,}",
            fmt.percent(pair["num_images"] / num_images[pair["target"]], 1),
        ]
        for pair in analysis["most_confused"][:count]
    ]
    if not rows:
        return page.panel("Most confused classes", "Every image is classified correctly.", Html(""))
    table = page.table(["target", "predicted", "images", "of that class"], rows, (2, 3), "Most confused classes")
    return page.panel("Most confused classes", "How many images of a class are taken for another one.", table)


def _reliability(analysis: Mapping[str, Any]) -> Html:
    calibration = analysis["calibration"]
    bins = list(zip(calibration["confidence"], calibration["accuracy"], calibration["num_images"], strict=True))
    used = [(confidence, accuracy, number / analysis["num_images"]) for confidence, accuracy, number in bins if number]
    series = (
        Series("accuracy", tuple((confidence, accuracy) for confidence, accuracy, _ in used), 0, dots=True),
        Series("calibrated", ((0.0, 0.0), (1.0, 1.0)), 7, dash=1),
        Series("share of the images", tuple((confidence, share) for confidence, _, share in used), 1, 2, dots=True),
    )
    error = fmt.percent(analysis["metrics"]["calibration_error"])
    note = (
        f"Expected calibration error {error} ({len(bins)} bins). Below the diagonal, the model is more confident "
        "than it is right."
    )
    chart = Chart(
        "Reliability", "percent", series, x_max=1.0, note=note, x_name="confidence", y_range=(0.0, 1.0)
    )  # fmt: skip
    return draw(chart)


def _classes(analysis: Mapping[str, Any]) -> Html:
    """Every class, the one with the lowest F1 first."""
    classes = analysis["classes"]
    taken_for: dict[int, tuple[int, int]] = {}
    for target, predicted, count in _cells(analysis) if "confusion" in analysis else ():
        if target != predicted and count > taken_for.get(target, (0, 0))[1]:
            taken_for[target] = (predicted, count)
    columns = {name: title for name, title in _COLUMNS.items() if name in classes[0]}
    order = sorted(range(len(classes)), key=lambda n: (classes[n]["f1"] is None, classes[n]["f1"], n))
    rows = []
    for number in order:
        row, wrong = classes[number], taken_for.get(number)
        rows.append(
            [
                row["name"],
                f"{row['num_images']:,}",
                f"{row['num_predicted']:,}",
                *(fmt.percent(row[name]) for name in columns),
                *([f"{classes[wrong[0]]['name']} ({wrong[1]:,})" if wrong else ""] if "confusion" in analysis else []),
            ]
        )
    head = ["class", "images", "predicted", *columns.values()]
    if "confusion" in analysis:
        head.append("most often taken for")
    table = page.table(head, rows, range(1, 3 + len(columns)), "Classes", is_sortable=True)
    note = el("p", {"class": "hint"}, "Click a column's name to sort by it.") if len(rows) > 1 else Html("")
    return page.fold(f"Classes: {len(rows):,}", join([note, table]), is_open=len(rows) <= MAX_OPEN_ROWS)
