"""The figures of `throughput.py` as text: a line each, and Markdown tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def network_lines(recipe: str, found: dict[str, Any]) -> list[str]:
    """One network's figures, a line each."""
    text = [f"{recipe} ({found['wall_s']:.0f} s)"]
    for row in found["rows"]:
        share = f", {100 * row['roofline_fraction']:.0f} % of the roofline" if "roofline_fraction" in row else ""
        rate = f"{row['images_per_s']:,.0f} images/s{_against_baseline(row)}"
        text.append(f"  {row['kind']} {row['mode']} batch {row['batch']}: {rate}{share}")
    return [*text, *(f"  {reason}" for reason in found["failed"])]


def markdown(found: dict[str, dict[str, Any]], peaks: dict[str, tuple[float, float]]) -> str:
    """Training by precision, and inference by batch size."""
    modes = [
        mode
        for mode in ("fp32", "tf32", "fp16", "bf16")
        if mode in {r["mode"] for f in found.values() for r in f["rows"]}
    ]
    text = ["Peaks measured in this run: " + ", ".join(f"{m} {p[0] / 1e12:.3g} TFLOP/s" for m, p in peaks.items())
            + f"; copy {next(iter(peaks.values()))[1] / 1e12:.3g} TB/s, reads and writes counted.", ""]  # fmt: skip
    text += ["Training, images/s (times the first precision; fraction of the roofline, what limits it):", ""]
    text += _table(["network", "batch", *modes], [_training_cells(name, f, modes) for name, f in found.items()])
    batches = sorted({r["batch"] for f in found.values() for r in f["rows"] if r["kind"] == "infer"})
    for mode in modes:
        rows = [_inference_cells(name, f, mode, batches) for name, f in found.items()]
        if any(cell != "-" for row in rows for cell in row[1:]):
            text += [
                "",
                f"Inference in {mode}, images/s (p50 / p95 in ms; fraction of the roofline, what limits it):",
                "",
            ]
            text += _table(["network", *(f"batch {batch}" for batch in batches)], rows)
    failed = [f"- {name}: {reason}" for name, f in found.items() for reason in f["failed"]]
    return "\n".join([*text, *(["", "Not measured:", "", *failed] if failed else [])]) + "\n"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *(f"| {' | '.join(row)} |" for row in rows)]


def _training_cells(name: str, found: dict[str, Any], modes: Sequence[str]) -> list[str]:
    rows = {row["mode"]: row for row in found["rows"] if row["kind"] == "train"}
    first = next((rows[mode]["images_per_s"] for mode in modes if mode in rows), None)
    batch = "/".join(sorted({str(row["batch"]) for row in rows.values()})) or "-"
    cells = []
    for mode in modes:
        row = rows.get(mode)
        cells.append("-" if row is None else _cell(row, f"{row['images_per_s'] / first:.2f} x"))
    return [name, batch, *cells]


def _inference_cells(name: str, found: dict[str, Any], mode: str, batches: Sequence[int]) -> list[str]:
    rows = {row["batch"]: row for row in found["rows"] if row["kind"] == "infer" and row["mode"] == mode}
    cells = []
    for batch in batches:
        row = rows.get(batch)
        cells.append(
            "-" if row is None else _cell(row, f"{row['latency_ms']['p50']:.2f} / {row['latency_ms']['p95']:.2f}")
        )
    return [name, *cells]


def _cell(row: dict[str, Any], detail: str) -> str:
    return f"{row['images_per_s']:,.0f} ({detail}{_of_roofline(row)}{_against_baseline(row)})"


def _against_baseline(row: dict[str, Any]) -> str:
    baseline = row.get("baseline")
    return f"; baseline {baseline:,.0f}, {row['images_per_s'] / baseline:.2f} x" if baseline else ""


def _of_roofline(row: dict[str, Any]) -> str:
    return f"; {100 * row['roofline_fraction']:.0f} %, {row['limited_by']}" if "roofline_fraction" in row else ""
