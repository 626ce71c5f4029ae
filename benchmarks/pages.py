"""The tables and charts of README and of docs/results, made from the stored figures.

A page is Markdown written by hand, with generated blocks between `<!-- figures: CASE ... -->` (one table of all the
cases) or `<!-- chart: CASE -->` and `<!-- end -->`; `<!-- published: TABLE -->` is one of published figures.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from benchmarks import charts, vendors
from benchmarks.cases import CASES, HEADLINES, Case, process_rows
from benchmarks.results import DATA, ROOT, Result, Row, load

LEFT_OUT = ("numpy", "pillow")  # versions that are in the JSON alone
PAGES = ("README.md", "docs/index.md", "docs/how-to/fuse.md", "docs/results/*.md")
CHART_LIMIT = 4  # a ratio above it would make all other bars short
IMAGES = ROOT / "docs" / "images" / "results"
BLOCK = re.compile(r"(<!-- (figures|chart|published): ([\w -]+?) -->\n).*?(<!-- end -->)", re.DOTALL)


def write_pages(root: Path = ROOT) -> list[Path]:
    """Write every page and chart that differs from the stored figures; the files that were written."""
    written = []
    for path, text in generated(root):
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
            written.append(path)
    return written


def generated(root: Path = ROOT) -> Iterator[tuple[Path, str]]:
    """Each page and chart, with the text that follows from the stored figures."""
    for page in sorted(path for pattern in PAGES for path in root.glob(pattern)):
        text = page.read_text(encoding="utf-8")
        yield page, _filled(text, page)
        for name in (match[3] for match in BLOCK.finditer(text) if match[2] == "chart"):
            for palette in charts.PALETTES:
                yield IMAGES / f"{name}-{palette}.svg", _chart(name, palette)


def _filled(text: str, page: Path) -> str:
    return BLOCK.sub(lambda match: match[1] + _block(match[2], match[3], page) + match[4], text)


def cases_of(text: str) -> list[str]:
    """The cases whose figures a page shows, in order."""
    names = [name for match in BLOCK.finditer(text) if match[2] != "published" for name in match[3].split()]
    return list(dict.fromkeys(case for name in names for case in _cases(name)))


def table(*results: Result) -> str:
    """The figures of one case or several as a Markdown table, with what they were measured on below."""
    cases = [CASES[result.case] for result in results]
    is_beside = len(cases) > 1 and all(case.rows is process_rows for case in cases)
    lines = _phases(results) if is_beside else _figures(results)
    return "\n".join([*lines, "", *_conditions(results), ""]) + "\n"


def _figures(results: Sequence[Result]) -> list[str]:
    """A line for each row; a column says which of several cases it is of."""
    first = CASES[results[0].case]
    rows = [row for result in results for row in result.rows]
    more = list(dict.fromkeys(name for row in rows for name in row.more))
    has_baseline = any(row.baseline for row in rows)
    units = {row.unit for row in rows}
    value = first.value + (f", {units.pop()}" if len(units) == 1 and "" not in units else "")
    has_dates = len({row.date or result.date for result in results for row in result.rows}) > 1
    head = ["", *([first.label[0]] if len(results) > 1 else []), value]
    head += [*([first.baseline, "ratio"] if has_baseline else []), "n", *more, *(["measured"] if has_dates else [])]
    lines = [_cells(head), _rule(len(head))]
    for result in results:
        for row in result.rows:
            case = CASES[result.case]
            name, *cells = _row(row, case, head, more)
            label = [case.label[1]] if len(results) > 1 else []
            date = [row.date or result.date] if has_dates else []
            lines.append(_cells([name, *label, *cells, *date]))
    return lines


def _phases(results: Sequence[Result]) -> list[str]:
    """A line for each phase of a process, and a column for each process."""
    names = list(dict.fromkeys(row.name for result in results for row in result.rows))
    found = [{row.name: row for row in result.rows} for result in results]
    head = [
        "seconds",
        *(f"{CASES[result.case].title.partition(', phases')[0]} (n = {result.rows[0].n})" for result in results),
    ]
    lines = [[name, *(_range(rows[name]) if name in rows else "" for rows in found)] for name in names]
    return [_cells(head), _rule(len(head)), *map(_cells, lines)]


def headlines() -> str:
    """The table of the front page: one row from each of several cases, with the date of each."""
    lines = [_cells(["", "Reconv", "baseline", "ratio", "measured"]), _rule(5)]
    for name, row_name, label in HEADLINES:
        result = load(name)
        row = next(row for row in result.rows if row.name == row_name)
        baseline = f"{number(row.baseline)} {row.baseline_name or CASES[name].baseline}" if row.baseline else ""
        times = f"**{ratio(row)}**" if row.ratio else ""
        lines.append(_cells([label, number(row.value), baseline, times, row.date or result.date]))
    return "\n".join(lines) + "\n"


def number(value: float) -> str:
    """A figure with thousands separators and at least three significant digits."""
    if value >= 1000 or value == round(value):
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 100 else f"{value:.2f}"


def ratio(row: Row) -> str:
    """Times the baseline."""
    return "" if row.ratio is None else f"{row.ratio:.2f}" if row.ratio < 10 else f"{row.ratio:.1f}"


def _block(kind: str, name: str, page: Path) -> str:
    if kind == "published":
        return vendors.table(name)
    if kind == "figures":
        if name == "headlines":
            return headlines()
        measured = [load(case) for case in name.split() if case in stored_cases()]
        return table(*measured) if measured else "\nNot measured yet.\n\n"
    folder = os.path.relpath(IMAGES, page.parent)
    light, dark = (f"{folder}/{name}-{palette}.svg" for palette in ("light", "dark"))
    return (
        f'<picture><source media="(prefers-color-scheme: dark)" srcset="{dark}">'
        f'<img src="{light}" alt="{_chart_title(name)}"></picture>\n'
    )


def _cases(name: str) -> list[str]:
    return list(dict.fromkeys(case for case, *_ in HEADLINES)) if name == "headlines" else [name]


def _chart(name: str, palette: str) -> str:
    if name == "headlines":
        chosen = [(load(case), row_name, label) for case, row_name, label in HEADLINES]
        rows = [(row, label) for result, row_name, label in chosen for row in result.rows if row.name == row_name]
    else:
        rows = [(row, row.name) for row in load(name).rows]
    baseline = "torch.compile" if name == "headlines" else CASES[name].baseline
    bars = [
        charts.Bar(label, row.ratio, f"{number(row.value)} images/s, {ratio(row)} x")
        for row, label in rows
        if row.ratio and row.ratio < CHART_LIMIT and row.unit == "images/s"
    ]
    return charts.bars(_chart_title(name), "Reconv", baseline, bars, palette)


def _chart_title(name: str) -> str:
    return (
        "One NVIDIA H200, bf16, images/s beside torch.compile"
        if name == "headlines"
        else CASES[name].title.replace("`", "")
    )


def _row(row: Row, case: Case, head: Sequence[str], more: Sequence[str]) -> list[str]:
    is_in_head = any(cell.endswith(f", {row.unit}") for cell in head)
    value = number(row.value) + ("" if is_in_head or not row.unit else f" {row.unit}")
    cells = [row.name, _range(row, value)]
    if "ratio" in head:
        name = row.baseline_name or case.baseline
        name = "" if name in (*head, "baseline") else f" {name}"
        cells += [number(row.baseline) + name if row.baseline else "", f"**{ratio(row)}**" if row.ratio else ""]
    return [*cells, str(row.n or ""), *(row.more.get(column, "") for column in more)]


def _range(row: Row, value: str = "") -> str:
    """A median, with the lowest and highest value where they are known."""
    value = value or number(row.value)
    if row.low is None or row.high is None:
        return value
    return f"{value} ({number(row.low)} to {number(row.high)})"


def _conditions(results: Sequence[Result]) -> list[str]:
    """Date, hardware, versions and the command that measures again."""
    if len(results) == 1:
        return [f"{_measured_on(results[0])}:", "", f"    {_command(results[0])}"]
    commands: dict[str, list[str]] = {}
    for result in results:
        commands.setdefault(_measured_on(result), []).append(f"`{_command(result)}`")
    return [f"- {measured_on}: {', '.join(lines)}" for measured_on, lines in commands.items()]


def _measured_on(result: Result) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items() if name not in LEFT_OUT)
    commit = f", commit `{result.commit}`" if result.commit else ""
    return f"{result.date}, {result.hardware}; {versions}{commit}"


def _command(result: Result) -> str:
    """The command that measures the case again."""
    case = CASES[result.case]
    if case.rows is None:
        return result.command
    return f"python -m benchmarks run {case.name}" + (" --data DIR" if case.data else "")


def _cells(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _rule(count: int) -> str:
    return "|" + "---|" * count


def stored_cases() -> list[str]:
    """The cases that have a file of figures."""
    return sorted(path.stem for path in DATA.glob("*.json"))
