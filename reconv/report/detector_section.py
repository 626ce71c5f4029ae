"""The report's section about a detector: precision over recall, sizes, kinds of errors and every class.

Owns what is said of the findings. Refuses to know how they were made. Invariant: pure functions of the findings; a run
without them has no section.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from reconv.logging import formatting as fmt
from reconv.report import page
from reconv.report.charts import Chart, Series, draw
from reconv.report.markup import Html, el
from reconv.report.run_record import Record

_OPEN_ROWS = 25  # a longer table of classes opens on demand
_COLUMNS = ("num_objects", "num_detections", "recall", "ap", "ap50", "voc10")
_WORDS = {"num_objects": "objects", "num_detections": "detections", "recall": "found", "voc10": "VOC AP"}


def detection(record: Record) -> Html:
    """Everything beyond the numbers of the evaluations."""
    findings = record.findings
    if findings is None:
        return Html("")
    partial = ", a part of the validation set" if findings["partial"] else ""
    intro = (
        f"Of the evaluation at step {findings['step']:,} ({findings['weights']} weights), over "
        f"{findings['num_images']:,} images{partial}. An object counts as found from an overlap of 0.5 on."
    )
    panels = el("div", {"class": "charts"}, _curves(findings), _sizes(findings))
    return page.section("What was found", panels, _errors(findings), _classes(findings), intro=intro)


def _panel(title: str, note: str, table: Html) -> Html:
    """A table with a heading, as large as a chart."""
    return el("figure", {"class": "panel"}, el("figcaption", None, el("h3", None, title), el("p", None, note)), table)


def _curves(findings: Mapping[str, Any]) -> Html:
    """Precision over recall of the mean and of some classes."""
    series = []
    for number, curve in enumerate(findings["curves"]):
        last = len(curve["precision"]) - 1
        points = tuple((place / last, value) for place, value in enumerate(curve["precision"]))
        series.append(Series(curve["name"], points, number, dash=0 if number == 0 else 1))
    num_known = sum(row["num_objects"] > 0 for row in findings["classes"])
    some = len(series) - 1 < num_known
    which = "; of the classes, the best and the worst." if some else "."
    note = f"The best precision at or above each recall, at an overlap of 0.5{which}"
    chart = Chart(
        "Precision over recall", "percent", tuple(series), x_max=1.0, note=note, x_name="recall", y_range=(0.0, 1.0)
    )
    return draw(chart)


def _errors(findings: Mapping[str, Any]) -> Html:
    """How many of the best detections are of each kind."""
    errors: Mapping[str, int] = findings["errors"]
    looked = sum(number for name, number in errors.items() if name != "missed")
    objects = sum(row["num_objects"] for row in findings["classes"])
    rows = [
        [name, f"{number:,}", _share(number, objects if name == "missed" else looked), findings["kinds"][name]]
        for name, number in errors.items()
    ]
    note = (
        f"The best detections of each class are looked at, as many as it has objects: {looked:,} in all. Shares are of "
        f"these; of what was missed, of the {objects:,} objects."
    )
    table = page.table(["kind", "number", "share", "what it is"], rows, (1, 2), "Kinds of errors")
    return el("div", {"class": "charts"}, _panel("Right and wrong", note, table))


def _sizes(findings: Mapping[str, Any]) -> Html:
    """Small, medium and large objects."""
    numbers: Mapping[str, float] = findings["numbers"]
    rows = [
        [
            bucket["name"],
            f"{bucket['num_objects']:,}",
            _share(bucket["num_found"], bucket["num_objects"]),
            fmt.percent(numbers.get(f"ap_{bucket['name']}")),
        ]
        for bucket in findings["sizes"]
    ]
    note = "Objects by their area in pixels of the original image: below 32 x 32, up to 96 x 96, and above."
    table = page.table(["size", "objects", "found", fmt.metric_name("ap")], rows, (1, 2, 3), "Sizes of objects")
    return _panel("Small, medium and large objects", note, table)


def _classes(findings: Mapping[str, Any]) -> Html:
    """Every class, the one with the most objects first."""
    classes = sorted(findings["classes"], key=lambda row: -row["num_objects"])
    columns = [
        name for name in ("num_objects", "num_detections", "recall", "ap", "ap50", "voc10") if name in classes[0]
    ]
    rows = [[row["name"], *(_cell(row, name) for name in columns)] for row in classes]
    head = ["class", *(_WORDS.get(name) or fmt.metric_name(name) for name in columns)]
    table = page.table(head, rows, range(1, len(head)), "Classes")
    return page.fold(f"Classes: {len(rows):,}", table, is_open=len(rows) <= _OPEN_ROWS)


def _cell(row: Mapping[str, Any], name: str) -> str:
    if name.startswith("num_"):
        return f"{row[name]:,}"
    return fmt.percent(row[name]) if row["num_objects"] else "no objects" if name == "recall" else "–"


def _share(number: int, whole: int) -> str:
    return fmt.percent(number / whole, 1) if whole else "–"
