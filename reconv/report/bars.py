"""Stacked horizontal bars as inline SVG, with a legend and the values as text for screen readers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from reconv.report.charts import NUM_COLORS
from reconv.report.markup import Html, el

_WIDTH, _LEFT, _RIGHT, _ROW, _BAR = 560, 92, 66, 30, 18


@dataclass(frozen=True, slots=True)
class StackedBar:
    """One bar: its name, the text at its end, and the size of each part."""

    label: str
    end: str
    parts: tuple[float, ...]


def draw_stacked_bars(title: str, note: str, names: Sequence[str], bars: Sequence[StackedBar]) -> Html:
    """Bars of equal length, each divided by the fractions of its parts."""
    rows = [_bar(bar, names, number) for number, bar in enumerate(bars)]
    texts = [f"{bar.label}: " + ", ".join(_texts(bar, names)) for bar in bars]
    size = {"viewBox": f"0 0 {_WIDTH} {_ROW * len(bars) + 8}", "role": "img", "aria-label": "; ".join([title, *texts])}
    legend = [
        el(
            "span",
            {"class": f"key {_color(number)}"},
            el("span", {"class": "swatch", "aria-hidden": "true"}),
            name,
        )
        for number, name in enumerate(names)
    ]
    return el(
        "figure",
        {"class": "chart bars"},
        el("figcaption", None, el("h3", None, title), el("p", None, note)),
        el("svg", size, *rows),
        el("div", {"class": "keys"}, *legend),
    )


def _bar(bar: StackedBar, names: Sequence[str], number: int) -> Html:
    width, total, y = _WIDTH - _LEFT - _RIGHT, sum(bar.parts) or 1.0, 4 + _ROW * number
    middle = y + _BAR / 2
    shapes = [el("text", {"x": _LEFT - 8, "y": middle, "dy": "0.35em", "text-anchor": "end"}, bar.label)]
    x = float(_LEFT)
    for position, (part, text) in enumerate(zip(bar.parts, _texts(bar, names), strict=True)):
        length = width * part / total
        box = {"x": f"{x:.1f}", "y": y, "width": f"{length:.1f}", "height": _BAR}
        shapes.append(
            el("g", {"class": _color(position)}, el("title", None, text), el("rect", box)) if part > 0 else Html("")
        )
        x += length
    shapes.append(el("text", {"x": _WIDTH - _RIGHT + 8, "y": middle, "dy": "0.35em"}, bar.end))
    return el("g", None, *shapes)


def _color(position: int) -> str:
    """The class of a part's color; parts after the last color begin again with pale ones."""
    return f"c{position % NUM_COLORS}" + (" pale" if position >= NUM_COLORS else "")


def _texts(bar: StackedBar, names: Sequence[str]) -> list[str]:
    total = sum(bar.parts) or 1.0
    return [f"{name} {100 * part / total:.1f} %" for name, part in zip(names, bar.parts, strict=True)]
