"""Line charts as inline SVG with the data that the page's script shows on hover.

Only finite points are drawn, and at most `MAX_POINTS` of a series.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reconv.core.text import printable
from reconv.logging import formatting as fmt
from reconv.report.markup import Html, data_block, el, join

MAX_POINTS = 600
NUM_COLORS = 8
_MAX_LETTERS_BESIDE_TICKS = 6
_DASHES = ("", "7 4", "2 3", "9 3 2 3")
Point = tuple[float, float]

# assets/page.js has the same formats under the same names.
_FORMATS: dict[str, Callable[[float], str]] = {
    "number": fmt.number,
    "percent": lambda v: f"{100 * v:.4g} %",
    "count": fmt.rate,
}
_MAX_VALUE = 1e100  # of a coordinate: differences and ratios of larger ones overflow


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a chart; non-finite values break it."""

    label: str
    points: tuple[Point, ...]
    color: int
    dash: int = 0
    dots: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """An event marked at a position on the x axis."""

    x: float
    kind: str  # resume, nonfinite
    text: str


@dataclass(frozen=True, slots=True)
class Band:
    """An expected value and its tolerance, shaded in the chart."""

    value: float
    tolerance: float
    label: str


@dataclass(frozen=True, slots=True)
class Chart:
    """The data of one chart."""

    title: str
    format: str  # number, percent or count
    series: tuple[Series, ...]
    x_max: float
    note: str = ""
    marks: tuple[Mark, ...] = ()
    band: Band | None = None
    best: Point | None = None
    may_be_log: bool = False
    from_zero: bool = False
    small: bool = False
    y_range: tuple[float, float] | None = None  # the visible range; None: all values
    steps_per_epoch: float | None = None  # to show steps on hover
    x_name: str = "epoch"


@dataclass(frozen=True, slots=True)
class _Frame:
    """The plot area and the scales from values to it."""

    width: int
    height: int
    x_max: float
    y_min: float
    y_max: float
    log: bool
    bottom: int
    ticks: tuple[float, ...]
    left: int = 58
    right: int = 14
    top: int = 16

    @property
    def plot_width(self) -> int:
        return self.width - self.left - self.right

    @property
    def plot_height(self) -> int:
        return self.height - self.top - self.bottom

    def x(self, value: float) -> float:
        return self.left + self.plot_width * (value / self.x_max)

    def y(self, value: float) -> float:
        low, high, at = self.y_min, self.y_max, value
        if self.log:
            low, high, at = math.log10(low), math.log10(high), math.log10(max(value, low))
        return self.top + self.plot_height * (1 - (at - low) / (high - low))


def draw(chart: Chart) -> Html:
    """The chart as a figure with a legend, an SVG and the data to show on hover."""
    downsampled = tuple(_downsample(_drawable(series.points)) for series in chart.series)
    frame = _frame(chart, downsampled)
    lines = [_line(frame, s, points, n) for n, (s, points) in enumerate(zip(chart.series, downsampled, strict=True))]
    svg = el(
        "svg",
        {
            "viewBox": f"0 0 {frame.width} {frame.height}",
            "role": "img",
            "tabindex": 0,
            "aria-label": _aria_label(chart),
        },
        _axes(frame, chart),
        _band(frame, chart),
        *(_mark(frame, mark) for mark in chart.marks if 0 <= mark.x <= frame.x_max),
        _clipped(frame, 0 if chart.y_range else 7, *lines, _best(frame, chart)),
        el("g", {"class": "cursor", "aria-hidden": "true"}),
    )
    title = el("figcaption", None, el("h3", None, chart.title), *([el("p", None, chart.note)] if chart.note else []))
    return el(
        "figure",
        {"class": "chart small" if chart.small else "chart"},
        title,
        svg,
        _legend(chart),
        el("div", {"class": "tip", "role": "status", "hidden": True}),
        data_block(_hover_data(frame, chart, downsampled)),
    )


def _clipped(frame: _Frame, margin: int, *content: Html) -> Html:
    """The content clipped to the plot area by an inner SVG, with a margin for dots on the edge."""
    x, y, width, height = frame.left - 7, frame.top - margin, frame.plot_width + 14, frame.plot_height + 2 * margin
    box = {"x": x, "y": y, "width": width, "height": height, "viewBox": f"{x} {y} {width} {height}"}
    return el("svg", box, *content)


def _frame(chart: Chart, downsampled: Sequence[Sequence[Point]]) -> _Frame:
    width, height = (380, 210) if chart.small else (560, 290)
    bottom = 30 if len(chart.x_name) <= _MAX_LETTERS_BESIDE_TICKS else 48
    values = list(chart.y_range or (y for points in downsampled for _, y in points if math.isfinite(y)))
    if chart.band and not chart.y_range:
        values += [chart.band.value - chart.band.tolerance, chart.band.value + chart.band.tolerance]
    length = chart.x_max if abs(chart.x_max) < _MAX_VALUE else 0.0
    x_max = max([length, *(x for points in downsampled for x, _ in points)]) or 1.0
    low, high = min(values, default=0.0), max(values, default=1.0)
    if chart.may_be_log and low > 0 and high / low > 50:
        y_min, y_max, ticks = _log_ticks(low, high)
        return _Frame(width, height, x_max, y_min, y_max, True, bottom, ticks)
    if chart.from_zero:
        low = min(low, 0.0)
    ceiling = 1.0 if chart.format == "percent" and high <= 1.0 else None
    y_min, y_max, ticks = _linear_ticks(low, high, ceiling)
    return _Frame(width, height, x_max, y_min, y_max, False, bottom, ticks)


def _nice_step(span: float, wanted: int) -> float:
    """The round number closest above span / wanted: 1, 2 or 5 times a power of ten."""
    rough = span / wanted
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)


def _linear_ticks(low: float, high: float, ceiling: float | None) -> tuple[float, float, tuple[float, ...]]:
    """The limits of the axis and its ticks; the axis of a fraction ends at 100 %."""
    if high - low < 1e-9 * max(abs(high), 1e-30):
        low, high = (low - abs(low) * 0.5, high + abs(high) * 0.5) if high else (0.0, 1.0)
    if ceiling is not None:
        high = min(high, ceiling)
        low = min(low, high - 1e-6)
    step = _nice_step(high - low, 5)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(n * step, 12) if step > 1e-9 else n * step for n in range(first, last + 1))
    return first * step, last * step, ticks


def _log_ticks(low: float, high: float) -> tuple[float, float, tuple[float, ...]]:
    """The limits of a logarithmic axis and its ticks."""
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    stride = max(1, math.ceil((last - first) / 6))
    factors = (1.0, 2.0, 5.0) if last - first <= 2 else (1.0,)
    ticks = [f * 10.0**n for n in range(first, last + 1, stride) for f in factors]
    inner = [t for t in ticks if low * 0.7 <= t <= high * 1.5]
    return min([low * 0.9, *inner]), max([high * 1.1, *inner]), tuple(inner)


def _drawable(points: Sequence[Point]) -> tuple[Point, ...]:
    """The points on the x axis; values that are too large for arithmetic become gaps."""
    return tuple((x, y if abs(y) < _MAX_VALUE else math.nan) for x, y in points if abs(x) < _MAX_VALUE)


def _downsample(points: Sequence[Point]) -> tuple[Point, ...]:
    """At most `MAX_POINTS` points: of each bin the lowest, the highest and the first that is not finite."""
    if len(points) <= MAX_POINTS:
        return tuple(points)
    num_bins = MAX_POINTS // 3
    kept: list[Point] = []
    for n in range(num_bins):
        bin_points = points[n * len(points) // num_bins : (n + 1) * len(points) // num_bins]
        finite = [p for p in bin_points if math.isfinite(p[1])]
        broken = [p for p in bin_points if not math.isfinite(p[1])][:1]
        extremes = [min(finite, key=lambda p: p[1]), max(finite, key=lambda p: p[1])] if finite else []
        kept += sorted({*extremes, *broken}, key=lambda p: p[0])
    return (*kept[:-1], points[-1])


def _line(frame: _Frame, series: Series, points: Sequence[Point], number: int) -> Html:
    """A path of the finite points; a point without neighbors is drawn as a dot."""
    path: list[str] = []
    dots: list[tuple[str, str]] = []
    pen_down, previous_alone = False, None
    for x, y in points:
        if not math.isfinite(y):
            dots += [previous_alone] if previous_alone else []
            pen_down, previous_alone = False, None
            continue
        at = (f"{frame.x(x):.1f}", f"{frame.y(y):.1f}")
        path.append(f"{'L' if pen_down else 'M'}{at[0]} {at[1]}")
        previous_alone = None if pen_down else at
        pen_down = True
        dots += [at] if series.dots and len(points) <= 60 else []
    dots += [previous_alone] if previous_alone else []
    return el(
        "g",
        {"class": f"series c{series.color % NUM_COLORS}", "data-series": number},
        el("path", {"d": "".join(path), "stroke-dasharray": _DASHES[series.dash % len(_DASHES)] or False}),
        *(el("circle", {"cx": x, "cy": y, "r": 2.6}) for x, y in dict.fromkeys(dots)),
    )


def _axes(frame: _Frame, chart: Chart) -> Html:
    to_text = _FORMATS[chart.format]
    parts: list[Html] = []
    for tick in frame.ticks:
        y = f"{frame.y(tick):.1f}"
        parts.append(el("line", {"class": "grid", "x1": frame.left, "x2": frame.width - frame.right, "y1": y, "y2": y}))
        label = {"class": "tick", "x": frame.left - 8, "y": y, "dy": "0.32em", "text-anchor": "end"}
        parts.append(el("text", label, to_text(tick)))
    bottom = frame.height - frame.bottom
    _, _, x_ticks = _linear_ticks(0.0, frame.x_max, None)
    for tick in (t for t in x_ticks if t <= frame.x_max * 1.0001):
        label = {"class": "tick", "x": f"{frame.x(tick):.1f}", "y": bottom + 20, "text-anchor": "middle"}
        parts.append(el("text", label, f"{tick:g}"))
    beside_ticks = {"x": frame.left - 11, "y": bottom + 20, "text-anchor": "end"}
    below_ticks = {"x": frame.left + frame.plot_width / 2, "y": bottom + 38, "text-anchor": "middle"}
    is_short = len(chart.x_name) <= _MAX_LETTERS_BESIDE_TICKS
    parts.append(el("text", {"class": "tick unit", **(beside_ticks if is_short else below_ticks)}, chart.x_name))
    parts.append(
        el("line", {"class": "axis", "x1": frame.left, "x2": frame.width - frame.right, "y1": bottom, "y2": bottom})
    )
    return el("g", {"class": "axes", "aria-hidden": "true"}, *parts)


def _band(frame: _Frame, chart: Chart) -> Html:
    if chart.band is None:
        return Html("")
    band = chart.band
    top = frame.y(min(band.value + band.tolerance, frame.y_max))
    bottom = frame.y(max(band.value - band.tolerance, frame.y_min))
    y = frame.y(band.value)
    area = {"x": frame.left, "y": f"{top:.1f}", "width": frame.plot_width, "height": f"{max(bottom - top, 0.5):.1f}"}
    return el(
        "g",
        {"class": "band"},
        el("rect", area),
        el("line", {"x1": frame.left, "x2": frame.width - frame.right, "y1": f"{y:.1f}", "y2": f"{y:.1f}"}),
        el("text", {"x": frame.width - frame.right - 4, "y": f"{bottom + 14:.1f}", "text-anchor": "end"}, band.label),
    )


def _mark(frame: _Frame, mark: Mark) -> Html:
    x, bottom = frame.x(mark.x), frame.height - frame.bottom
    if mark.kind == "resume":
        shape = el("line", {"x1": f"{x:.1f}", "x2": f"{x:.1f}", "y1": frame.top, "y2": bottom})
        flag = f"{x:.1f},{frame.top} {x + 8:.1f},{frame.top + 4} {x:.1f},{frame.top + 8}"
        shape = join([shape, el("polygon", {"points": flag})])
    else:
        y = bottom - 1
        shape = el("polygon", {"points": f"{x - 4.5:.1f},{y} {x + 4.5:.1f},{y} {x:.1f},{y - 9}"})
    return el("g", {"class": f"mark {mark.kind}"}, el("title", None, mark.text), shape)


def _best(frame: _Frame, chart: Chart) -> Html:
    if chart.best is None or not math.isfinite(chart.best[1]):
        return Html("")
    x, y = frame.x(chart.best[0]), frame.y(chart.best[1])
    text = f"best: {_FORMATS[chart.format](chart.best[1])} at {chart.x_name} {chart.best[0]:.4g}"
    return el(
        "g", {"class": "best"}, el("title", None, text), el("circle", {"cx": f"{x:.1f}", "cy": f"{y:.1f}", "r": 6})
    )


def _legend(chart: Chart) -> Html:
    """The names of the lines, as buttons that hide them."""
    items = [
        el(
            "button",
            {"type": "button", "class": f"c{s.color % NUM_COLORS}", "data-series": n, "aria-pressed": "true"},
            el(
                "svg",
                {"viewBox": "0 0 22 8", "aria-hidden": "true"},
                el("path", {"d": "M0 4H22", "stroke-dasharray": _DASHES[s.dash % len(_DASHES)] or False}),
                *([el("circle", {"cx": 11, "cy": 4, "r": 2.6})] if s.dots else []),
            ),
            s.label,
        )
        for n, s in enumerate(chart.series)
    ]
    return el("div", {"class": "legend", "role": "group", "aria-label": "Lines of this chart"}, *items)


def _aria_label(chart: Chart) -> str:
    """The text for screen readers: the first and last value of each line."""
    to_text, parts = _FORMATS[chart.format], []
    for series in chart.series:
        finite = [p for p in series.points if math.isfinite(p[1])]
        if finite:
            first, last = finite[0], finite[-1]
            parts.append(
                f"{series.label}: {to_text(first[1])} at {chart.x_name} {first[0]:.3g}, "
                f"{to_text(last[1])} at {chart.x_name} {last[0]:.3g}"
            )
    return f"{chart.title} by {chart.x_name}. " + ("; ".join(parts) or "no values") + ". Arrow keys show single values."


def _hover_data(frame: _Frame, chart: Chart, downsampled: Sequence[Sequence[Point]]) -> dict[str, object]:
    return {
        "left": frame.left,
        "top": frame.top,
        "width": frame.plot_width,
        "height": frame.plot_height,
        "xMax": frame.x_max,
        "yMin": frame.y_min,
        "yMax": frame.y_max,
        "log": frame.log,
        "format": chart.format,
        "stepsPerEpoch": chart.steps_per_epoch if math.isfinite(chart.steps_per_epoch or 0.0) else None,
        "xName": chart.x_name,
        "series": [
            {
                "label": printable(series.label),
                "color": series.color % NUM_COLORS,
                "points": [[float(f"{x:.6g}"), float(f"{y:.6g}")] for x, y in points if math.isfinite(y)],
            }
            for series, points in zip(chart.series, downsampled, strict=True)
        ],
    }
