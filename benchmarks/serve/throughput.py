"""Compare `reconv serve` with LitServe: ResNet-50, the same weights, images and preprocessing, in one run.

    python -m benchmarks.serve.throughput --litserve-python PYTHON [--device cuda] [--json FILE] [--markdown FILE]
    python -m benchmarks.serve.throughput --from-json FILE                       # the tables of an earlier run

PYTHON has LitServe and torchvision (`pip install litserve==0.2.19 'torchvision>=0.26,<0.29' 'torch>=2.11,<2.14'`).
All servers are started first and stopped by SIGSTOP while another one is measured. A round measures each of them once,
in alternating order. The load generator runs on the same cores: see `benchmarks/serve/http_load.py`.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.serve.http_load import Load, LoadResult, percentile_s, run_load
from benchmarks.serve.servers import (
    LITSERVE,
    RECONV,
    START_LIMIT_S,
    RunningServer,
    ServerConfig,
    cpu_configs,
    cuda_configs,
    make_images,
    make_weights,
    write_images,
)

NUM_IMAGES = 64
OPEN_FRACTIONS = (0.5, 0.8)  # of the capacity of LitServe's best row
SEARCH_FRACTIONS = (1.05, 0.95, 0.85, 0.75, 0.65, 0.5)  # of a server's own capacity


@dataclass(frozen=True, slots=True)
class Settings:
    """Length and load of a measurement."""

    clients: int
    processes: int
    rounds: int
    warmup_s: float
    window_s: float
    open_rounds: int
    open_window_s: float
    max_p99_s: float


CPU = Settings(clients=8, processes=1, rounds=5, warmup_s=1, window_s=5, open_rounds=3, open_window_s=6, max_p99_s=1.0)
CUDA = Settings(
    clients=128, processes=4, rounds=5, warmup_s=0.5, window_s=2, open_rounds=2, open_window_s=3, max_p99_s=0.1
)


@dataclass(slots=True)
class Row:
    """A server and what was measured of it."""

    config: ServerConfig
    running: RunningServer
    per_s: list[float] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    labels: dict[int, set[int]] = field(default_factory=dict)

    @property
    def capacity_per_s(self) -> float:
        return statistics.median(self.per_s) if self.per_s else 0.0


class Bench:
    """The servers, and loads on one of them at a time."""

    def __init__(self, rows: Sequence[Row], images: Sequence[bytes], settings: Settings) -> None:
        self.rows, self._images, self._settings = list(rows), images, settings
        self._pool = (
            ProcessPoolExecutor(settings.processes, multiprocessing.get_context("spawn"))
            if settings.processes > 1
            else None
        )
        if self._pool is not None:
            list(self._pool.map(time.sleep, [1.0] * settings.processes))  # so that every process has started

    def load(self, row: Row, window_s: float, *, rate_per_s: float = 0.0, seed: int = 0) -> LoadResult:
        """A closed loop, or an open one of `rate_per_s`, on one server while the others stand still."""
        settings = self._settings
        load = Load(
            row.running.target,
            self._images,
            settings.warmup_s,
            window_s,
            clients=0 if rate_per_s else settings.clients,
            rate_per_s=rate_per_s,
            seed=seed,
        )
        row.running.resume()
        result = run_load(load, settings.processes, self._pool)
        row.running.suspend()
        row.errors += result.errors
        for image, labels in result.labels.items():
            row.labels.setdefault(image, set()).update(labels)
        return result

    def closed_loop(self, log: Callable[[str], None]) -> None:
        """Measure every server once per round, in alternating order."""
        for number in range(self._settings.rounds):
            for row in self.rows if number % 2 == 0 else self.rows[::-1]:
                result = self.load(row, self._settings.window_s)
                row.per_s.append(result.per_s)
                row.latencies_s += result.latencies_s
                log(f"round {number + 1}: {_name(row)}: {result.per_s:.1f}/s, {len(result.errors)} errors")

    def open_loop(self, rows: Sequence[Row], rate_per_s: float) -> list[dict[str, Any]]:
        """Latencies of servers at one rate, alternating."""
        pooled: dict[int, list[float]] = {number: [] for number in range(len(rows))}
        errors = dict.fromkeys(pooled, 0)
        for seed in range(self._settings.open_rounds):
            for number, row in enumerate(rows):
                result = self.load(row, self._settings.open_window_s, rate_per_s=rate_per_s, seed=seed)
                pooled[number] += result.latencies_s
                errors[number] += len(result.errors)
        return [
            {
                "server": row.config.server,
                "precision": row.config.precision,
                "options": row.config.label,
                "rate_per_s": rate_per_s,
                "p50_ms": 1000 * percentile_s(pooled[number], 0.5),
                "p99_ms": 1000 * percentile_s(pooled[number], 0.99),
                "requests": len(pooled[number]),
                "errors": errors[number],
            }
            for number, row in enumerate(rows)
        ]

    def highest_rate_per_s(self, row: Row) -> float:
        """The highest of a few fractions of a server's capacity at which its p99 stays within the bound; 0: none."""
        for fraction in SEARCH_FRACTIONS:
            rate_per_s = fraction * row.capacity_per_s
            result = self.load(row, self._settings.open_window_s, rate_per_s=rate_per_s, seed=7)
            if not result.errors and percentile_s(result.latencies_s, 0.99) <= self._settings.max_p99_s:
                return rate_per_s
        return 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--litserve-python", default=sys.executable, metavar="PYTHON")
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--rounds", type=int, help="of the closed loop [default: 5]")
    parser.add_argument("--window", type=float, metavar="S", help="seconds of each measurement")
    parser.add_argument("--clients", type=int, help="of the closed loop [default: 8, on a GPU 128]")
    parser.add_argument("--only", metavar="TEXT", action="append", help="only servers whose row contains TEXT")
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--from-json", type=Path, metavar="FILE")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(143))  # end the servers, too
    results = json.loads(options.from_json.read_text()) if options.from_json else measure(options)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    text = markdown(results)
    if options.markdown:
        options.markdown.write_text(text)
    print(text)


def measure(options: argparse.Namespace) -> dict[str, Any]:
    """Start the servers, measure them, end them."""
    base = CUDA if options.device == "cuda" else CPU
    settings = Settings(
        clients=options.clients or base.clients,
        processes=base.processes,
        rounds=options.rounds or base.rounds,
        warmup_s=base.warmup_s,
        window_s=options.window or base.window_s,
        open_rounds=base.open_rounds,
        open_window_s=options.window or base.open_window_s,
        max_p99_s=base.max_p99_s,
    )
    start_s, load_average = time.monotonic(), os.getloadavg()[0]
    configs = cuda_configs() if options.device == "cuda" else cpu_configs()
    if options.only:
        names = {config: f"{config.server} {config.precision} {config.label}" for config in configs}
        configs = [config for config, name in names.items() if any(text in name for text in options.only)]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        images, weights = make_images(NUM_IMAGES), folder / "resnet50.pth"
        make_weights(images, weights)
        write_images(images, folder)
        started = [
            Row(config, RunningServer(config, weights, options.device, options.litserve_python, folder))
            for config in configs
        ]
        try:
            rows, failed = _wait_until_ready(started)
            _log(f"{len(rows)} servers are ready after {time.monotonic() - start_s:.0f} s")
            bench = Bench(rows, images, settings)
            bench.closed_loop(_log)
            results = _results(bench, settings)
        finally:
            for row in started:
                row.running.end()
    results["failed"] = failed
    results["machine"] = {
        "device": options.device,
        "cores": len(os.sched_getaffinity(0)),
        "processor": _processor(),
        "gpu": _gpu() if options.device == "cuda" else None,
        "python": platform.python_version(),
        "load_average_before": load_average,
        "image_bytes": round(statistics.mean(map(len, images))),
        "wall_s": round(time.monotonic() - start_s),
    }
    return results


def _wait_until_ready(rows: Sequence[Row]) -> tuple[list[Row], list[dict[str, str]]]:
    """The rows whose servers have started, suspended, and why others have not."""
    ready, failed, deadline = [], [], time.monotonic() + START_LIMIT_S
    for row in rows:
        why = row.running.wait_until_ready(deadline)
        if why:
            failed.append({"server": _name(row), "why": why})
            _log(f"{_name(row)}: {why}")
            row.running.end()
        else:
            ready.append(row)
    for row in ready:
        row.running.suspend()
    return ready, failed


def _results(bench: Bench, settings: Settings) -> dict[str, Any]:
    """The closed loop's rows, and the open loop of the servers that are compared."""
    reference = next((row for row in bench.rows if row.config.server == LITSERVE), bench.rows[0])
    closed = [
        {
            "server": row.config.server,
            "precision": row.config.precision,
            "options": row.config.label,
            "is_compared": row.config.is_compared,
            "per_s": row.per_s,
            "p50_ms": 1000 * percentile_s(row.latencies_s, 0.5),
            "p99_ms": 1000 * percentile_s(row.latencies_s, 0.99),
            "requests": len(row.latencies_s),
            "errors": len(row.errors),
            "first_error": row.errors[0] if row.errors else None,
        }
        for row in bench.rows
    ]
    opened, highest = [], []
    compared = {row.config.precision: row for row in reversed(bench.rows) if row.config.is_compared}
    for ours in compared.values():
        theirs = _best(bench.rows, LITSERVE, ours.config.precision)
        if theirs is None or not theirs.capacity_per_s or not ours.capacity_per_s:
            continue
        for fraction in OPEN_FRACTIONS:
            opened += bench.open_loop([theirs, ours], fraction * theirs.capacity_per_s)
        for row in (theirs, ours):
            rate = {"server": row.config.server, "precision": row.config.precision, "options": row.config.label}
            highest.append({**rate, "rate_per_s": bench.highest_rate_per_s(row)})
    for entry, row in zip(closed, bench.rows, strict=True):  # the labels of all loads
        entry["top1_equal"] = _agreement(row, reference)
        entry["top1_distinct"] = len(set().union(*row.labels.values())) if row.labels else 0
    return {
        "closed": closed,
        "open": opened,
        "highest": highest,
        "clients": settings.clients,
        "rounds": settings.rounds,
        "window_s": settings.window_s,
        "max_p99_ms": 1000 * settings.max_p99_s,
    }


def _best(rows: Sequence[Row], server: str, precision: str) -> Row | None:
    candidates = [row for row in rows if (row.config.server, row.config.precision) == (server, precision)]
    return max(candidates, key=lambda row: row.capacity_per_s, default=None)


def _agreement(row: Row, reference: Row) -> float:
    """The fraction of images with one answer, and the reference's."""
    images = row.labels.keys() & reference.labels.keys()
    equal = [row.labels[image] == reference.labels[image] and len(row.labels[image]) == 1 for image in images]
    return sum(equal) / len(equal) if equal else 0.0


def markdown(results: dict[str, Any]) -> str:
    """The tables of docs/results/serve.md."""
    machine = results["machine"]
    where = machine["gpu"] or f"{machine['cores']} cores, {machine['processor']}"
    lines = [
        f"{where}; {results['clients']} clients, n = {results['rounds']} rounds of {results['window_s']:g} s, "
        f"load average before {machine['load_average_before']:.1f}",
        "",
        "| server | precision | options | requests/s, median (range) | p50 | p99 | top-1 equal | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["closed"]:
        rates = row["per_s"]
        lines.append(
            f"| {row['server']} | {row['precision']} | {row['options'] or 'defaults'} | "
            f"{statistics.median(rates):,.1f} ({min(rates):,.1f} to {max(rates):,.1f}) | "
            f"{row['p50_ms']:,.0f} ms | {row['p99_ms']:,.0f} ms | {100 * row['top1_equal']:.1f} % | {row['errors']} |"
        )
    lines += ["", *_ratios(results["closed"]), ""]
    lines += [
        "| server | precision | options | arrivals/s | p50 | p99 | requests | errors |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in results["open"]:
        lines.append(
            f"| {row['server']} | {row['precision']} | {row['options'] or 'defaults'} | {row['rate_per_s']:,.1f} | "
            f"{row['p50_ms']:,.0f} ms | {row['p99_ms']:,.0f} ms | {row['requests']} | {row['errors']} |"
        )
    bound = f"{results['max_p99_ms']:,.0f} ms"
    lines.append("")
    for row in results["highest"]:
        rate = f"{row['rate_per_s']:,.1f}/s" if row["rate_per_s"] else "none of those tried"
        lines.append(f"- {row['server']}, {row['precision']}: highest rate with p99 within {bound}: {rate}")
    lines += [f"- not measured: {row['server']}: {row['why']}" for row in results["failed"]]
    return "\n".join(lines) + "\n"


def _ratios(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Each row that is compared, against the fastest LitServe of its precision: median and range over rounds."""
    lines = []
    for row in (row for row in rows if row["is_compared"]):
        others = [other for other in rows if (other["server"], other["precision"]) == (LITSERVE, row["precision"])]
        if not others:
            continue
        best = max(others, key=lambda other: statistics.median(other["per_s"]))
        ratios = [ours / theirs for ours, theirs in zip(row["per_s"], best["per_s"], strict=True) if theirs > 0]
        lines.append(
            f"- {RECONV} {row['precision']}, {row['options'] or 'defaults'}: "
            f"{statistics.median(ratios):.2f} times the throughput of {LITSERVE} "
            f"({best['options']}), {min(ratios):.2f} to {max(ratios):.2f} over {len(ratios)} rounds; "
            f"p99 {row['p99_ms']:,.0f} against {best['p99_ms']:,.0f} ms"
        )
    return lines


def _name(row: Row) -> str:
    return f"{row.config.server} {row.config.precision} {row.config.label}".rstrip()


def _processor() -> str:
    names = [
        line.partition(":")[2].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if "model name" in line
    ]
    return names[0] if names else platform.machine()


def _gpu() -> str:
    import torch

    return torch.cuda.get_device_name()


def _log(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
