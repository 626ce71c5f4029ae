"""Published figures of the programs that Reconv replaces (`recipes/published.csv`, oldest first), beside our own."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, fields
from functools import cache
from typing import Any, Literal

from reconv.recipe.presets import PRESETS
from reconv.recipe.schema import Recipe

FILE = PRESETS / "published.csv"
Kind = Literal["training", "inference", "serving", "accuracy"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """A speed or an accuracy with the hardware it was measured on; None is what the source does not say.

    Throughputs are of all devices together, `batch` is of one device, latencies are of one batch or request.
    """

    kind: Kind
    network: str
    hardware: str
    precision: str  # half, tf32, fp32 or int8-qat
    source: str
    devices: int | None = None
    batch: int | None = None
    concurrency: int | None = None
    epochs: int | None = None
    top1: float | None = None  # in percent, as published
    spread: float | None = None
    top5: float | None = None
    images_per_s: float | None = None
    hours: float | None = None
    latency_ms: float | None = None  # mean
    p50_ms: float | None = None
    p90_ms: float | None = None
    p95_ms: float | None = None
    p99_ms: float | None = None
    image_size: int | None = None
    note: str = ""

    @property
    def per_device(self) -> float | None:
        """Images/s of one device."""
        return None if self.images_per_s is None else self.images_per_s / (self.devices or 1)

    def as_json(self) -> dict[str, Any]:
        """The fields that are known."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value not in (None, "")}


_NUMBERS = {
    field.name: int if "int" in str(field.type) else float for field in fields(Figure) if "None" in str(field.type)
}


@cache
def published_figures() -> tuple[Figure, ...]:
    """Every row of the file."""
    with FILE.open(encoding="utf-8", newline="") as file:
        return tuple(_figure(row) for row in csv.DictReader(file))


def figures_for(recipe: Recipe, *kinds: Kind) -> list[Figure]:
    """The figures of a recipe's network at its image size: in its precision, or if there are none, in all of them."""
    network, size = network_of(recipe), recipe.data.preprocess.size
    found = [f for f in published_figures() if (f.network, f.image_size) == (network, size) and f.kind in kinds]
    return [f for f in found if f.precision == recipe.precision.family] or found


def newest(figures: Iterable[Figure]) -> list[Figure]:
    """The last published figure of each kind, hardware and setting, ordered by them."""
    last: dict[tuple[object, ...], Figure] = {}
    for figure in figures:
        result = (figure.epochs, figure.note) if figure.kind == "accuracy" else ()
        setting = (figure.hardware, figure.devices, figure.precision, figure.batch, figure.concurrency)
        last[figure.kind, *setting, *result] = figure
    return sorted(last.values(), key=_order)


def _order(figure: Figure) -> tuple[object, ...]:
    numbers = (figure.devices, figure.batch, figure.concurrency, figure.epochs)
    return (figure.kind == "accuracy", figure.hardware, *(number or 0 for number in numbers))


def network_of(recipe: Recipe) -> str:
    """The network's name in the file: a wide squeeze-and-excitation is a network of its own there."""
    return recipe.model.name + "_widese" * (recipe.model.options.get("se_base") == "expanded")


def comparison(ours: Sequence[Figure], theirs: Sequence[Figure]) -> tuple[list[str], list[list[str]]]:
    """A table of our figures above the published ones, without empty columns: its head and its rows."""
    figures = [*ours, *theirs]
    columns = {
        "source": [f.source for f in figures],
        "hardware": [f.hardware for f in figures],
        "devices": [_count(f.devices) for f in figures],
        "precision": [f.precision for f in figures],
        "batch": [_count(f.batch) for f in figures],
        "requests": [_count(f.concurrency) for f in figures],
        "images/s": [_rate(f.images_per_s) for f in figures],
        "ours, per device": ["" for _ in ours] + [_ratio(ours, figure) for figure in theirs],
        "mean ms": [_number(f.latency_ms) for f in figures],
        "p99 ms": [_number(f.p99_ms) for f in figures],
        "epochs": [_count(f.epochs) for f in figures],
        "hours": [_number(f.hours) for f in figures],
        "top-1": [accuracy_text(f) for f in figures],
        "note": [f.note for f in figures],
    }
    shown = {name: cells for name, cells in columns.items() if any(cells)}
    return list(shown), [list(row) for row in zip(*shown.values(), strict=True)]


def accuracy_text(figure: Figure) -> str:
    """Top-1 accuracy in percent with its spread; empty if there is none."""
    if figure.top1 is None:
        return ""
    return f"{figure.top1:.2f}" + ("" if figure.spread is None else f" ± {figure.spread:.2g}")


def _ratio(ours: Sequence[Figure], figure: Figure) -> str:
    """Speedup of ours with the same batch or number of requests, for each device; empty without any."""
    for own in ours:
        of_training = own.kind == figure.kind == "training"
        of_requests = "training" not in (own.kind, figure.kind)
        same = of_requests and (own.batch, own.concurrency) == (figure.batch, figure.concurrency)
        if (of_training or same) and own.per_device and figure.per_device:
            ratio = own.per_device / figure.per_device
            return f"{ratio:.2f} x" if ratio >= 0.1 else f"{ratio:.1g} x"
    return ""


def _figure(row: dict[str, str]) -> Figure:
    values: Iterator[tuple[str, Any]] = ((name, _NUMBERS.get(name, str)(text)) for name, text in row.items() if text)
    return Figure(**dict(values))


def _count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:,.1f}".removesuffix(".0")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"
