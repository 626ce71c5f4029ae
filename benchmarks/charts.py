"""Charts of measured figures as SVG files, each in a light and a dark form."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

# The colors of the report and the playground (serve/playground/page.css).
PALETTES = {
    "light": {"ink": "#1a2029", "soft": "#5a6574", "ours": "#0072b2", "baseline": "#b9c2cc"},
    "dark": {"ink": "#e7ebf0", "soft": "#9ba7b5", "ours": "#56b4e9", "baseline": "#4a5563"},
}
_WIDTH, _LEFT, _RIGHT, _TOP, _BAR, _GAP = 820, 240, 190, 44, 13, 15
_FONT = "font-family=\"system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif\""


@dataclass(frozen=True, slots=True)
class Bar:
    """A figure as a multiple of its baseline."""

    label: str
    ratio: float
    end: str  # text at the end of the bar


def bars(title: str, ours: str, baseline: str, rows: Sequence[Bar], palette: str) -> str:
    """A horizontal bar per figure above one for its baseline; every baseline has the same length."""
    colors = PALETTES[palette]
    step = 2 * _BAR + _GAP
    height = _TOP + step * len(rows) + 6
    legend = "".join(
        f'<rect x="{x}" y="14" width="12" height="12" rx="2" fill="{colors[key]}"/>'
        f'<text x="{x + 18}" y="24" fill="{colors["soft"]}">{escape(name)}</text>'
        for x, key, name in ((_LEFT, "ours", ours), (_LEFT + 90, "baseline", baseline))
    )
    unit = (_WIDTH - _LEFT - _RIGHT) / max(1.0, *(row.ratio for row in rows))
    shapes = "".join(_bar(row, _TOP + step * number, unit, colors) for number, row in enumerate(rows))
    described = escape(f"{title}: " + "; ".join(f"{row.label} {row.end}" for row in rows), quote=True)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="{_WIDTH}" '
        f'height="{height}" role="img" aria-label="{described}" font-size="13" {_FONT}>{legend}{shapes}</svg>\n'
    )


def _bar(row: Bar, top: int, unit: float, colors: dict[str, str]) -> str:
    end = _LEFT + unit * max(row.ratio, 1.0) + 8
    shape = f'<rect x="{_LEFT}" height="{_BAR}" rx="2"'
    return (
        f'<text x="{_LEFT - 10}" y="{top + _BAR + 5}" text-anchor="end" fill="{colors["ink"]}">'
        f"{escape(row.label)}</text>"
        f'{shape} y="{top}" width="{unit * row.ratio:.1f}" fill="{colors["ours"]}"/>'
        f'{shape} y="{top + _BAR + 1}" width="{unit:.1f}" fill="{colors["baseline"]}"/>'
        f'<text x="{end:.1f}" y="{top + _BAR + 5}" fill="{colors["ink"]}">'
        f'<tspan font-weight="600">{escape(row.end)}</tspan></text>'
    )
