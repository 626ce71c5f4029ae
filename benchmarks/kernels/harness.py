"""Times kernels on a CUDA GPU: one row for each kernel and shape, ours beside what it replaces."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import islice
from statistics import median
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reconv.kernels.jit.compile_ahead import compile_ahead
from reconv.kernels.jit.launch import KernelVariant, trace_launches
from reconv.kernels.ops.batch_norm import NormParams

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DTYPE = torch.float16 if IS_INTERPRETED else torch.bfloat16  # the interpreter multiplies bfloat16 as integers
ROTATED_BYTES = 400e6  # of inputs, so that none stays in the L2 cache
REPEATS = 3
CHECKED_BATCH, CHECKED_GROUPS = 8, (3, 3, 2)
PRINTED_CONFIGS = 4
FAILED = float("inf")
UNTRACED = "torch.compile"  # a way that only a GPU runs


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """Shapes of a case's tensors; `max_side` limits images where a kernel is run without a GPU."""

    batch: int = 256
    groups: tuple[int, ...] = ()  # of batch norm; default: one
    max_side: int | None = None

    @property
    def norm_groups(self) -> tuple[int, ...]:
        return self.groups or (self.batch,)

    def side(self, side: int) -> int:
        return side if self.max_side is None else min(side, self.max_side)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One kernel, or one pass of several, on one shape."""

    name: str
    draw: Callable[[str], Any]  # the row's tensors on a device; with "meta" for tracing
    ways: Mapping[str, Callable[[Any], object]]  # of those tensors; the first one is the baseline of the others
    num_bytes: float  # that must be moved
    counts: Mapping[str, int] = field(default_factory=dict)  # of this row in a step of each network
    configs: Sequence[Any] = ()  # launch configurations that --sweep tries; the first is in use
    ours: Callable[[Any, Any], object] | None = None  # "ours" with a configuration
    error: Callable[[Any, Any], float] | None = None  # of "ours" with a configuration; None: the one in use
    tolerance: float = 5e-3
    trace: Callable[[], Iterable[KernelVariant]] | None = None  # the kernels; None: those of all ways


Case = Callable[[Sizes], Iterable[Row]]


def entry(name: str) -> Callable[[Mapping[str, Callable[[], object]]], object]:
    """A way that calls the entry of this name, of rows that draw calls instead of tensors."""
    return lambda calls: calls[name]()


def random_tensor(*shape: int, device: str) -> Tensor:
    """Normal numbers in half precision, channels_last."""
    return torch.randn(*shape, device=device).to(DTYPE).contiguous(memory_format=torch.channels_last)


def random_norm(channels: int, device: str) -> NormParams:
    weight, bias = torch.randn(2, channels, device=device).unbind()
    return NormParams(weight.requires_grad_(), bias.requires_grad_(), torch.ones(channels, device=device), 1e-5)


def gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], dy: Tensor) -> tuple[Tensor, ...]:
    """A forward and a backward pass."""
    return torch.autograd.grad(function(*inputs), inputs, dy)


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """The norm of the difference over that of the expected values."""
    actual, expected = actual.double(), expected.double()
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-30))


def image_bytes(batch: int, channels: int, side: int) -> int:
    return batch * channels * side * side * DTYPE.itemsize


class Harness:
    """Compiles, checks and times the rows of cases; `is_dry` runs each way once, on the CPU and without timing."""

    def __init__(self, sizes: Sizes, *, sweep: bool, is_dry: bool, peak: float) -> None:
        self.sizes, self.sweep, self.is_dry, self.peak = sizes, sweep, is_dry, peak
        self.device = "cpu" if is_dry else "cuda"
        self.is_right = True

    def measure(self, case: Case, only: str = "", limit: int | None = None) -> list[dict[str, Any]]:
        """Print a line for each row, then the sums over a step of each network; returns the figures."""
        wanted = list(islice((row for row in case(self.sizes) if only in row.name), limit))
        small = replace(self.sizes, batch=CHECKED_BATCH, groups=CHECKED_GROUPS)
        checked = {row.name: row for row in case(small) if row.error is not None}
        if not self.is_dry:
            self._compile(wanted)
        width = max((len(row.name) for row in wanted), default=0)
        figures = []
        for row in wanted:
            figures.append(self._measure(row, checked.get(row.name), width))
            if not self.is_dry:
                torch.cuda.empty_cache()
        self._print_sums(wanted, figures)
        return figures

    def profile(self, case: Case, name: str, count: int = 12) -> None:
        """Print the kernels of one row that take longest."""
        row = next(row for row in case(self.sizes) if row.name == name)
        tensors, ours = row.draw(self.device), row.ways["ours"]
        ours(tensors)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            ours(tensors)
            torch.cuda.synchronize()
        events = sorted(profiled.key_averages(), key=lambda event: -event.self_device_time_total)
        total_us = sum(event.self_device_time_total for event in events)
        print(f"{name}: {total_us:.0f} µs in {sum(event.count for event in events)} launches, the longest kernels:")
        for event in events[:count]:
            print(f"{event.self_device_time_total:8.1f} µs {event.count:4} x  {event.key[:90]}")

    def _compile(self, rows: Sequence[Row]) -> None:
        """Start compiling all variants in parallel; the first launch of each waits for it."""
        variants: dict[KernelVariant, None] = {}
        for row in rows:
            if row.trace is not None:
                variants |= dict.fromkeys(row.trace())
                continue
            with trace_launches() as traced:
                tensors = row.draw("meta")
                for name, way in row.ways.items():
                    if name != UNTRACED:
                        way(tensors)
                for config in row.configs if self.sweep else ():
                    assert row.ours is not None
                    row.ours(tensors, config)
            variants |= traced
        device = torch.device("cuda", torch.cuda.current_device())
        compile_ahead(list(variants), device, lambda text: print(text[:200]))
        print(f"{len(variants)} variants to compile", flush=True)

    def _measure(self, row: Row, checked: Row | None, width: int) -> dict[str, Any]:
        sets = 1 if self.is_dry else max(2, min(8, round(ROTATED_BYTES / row.num_bytes)))
        tensors = [row.draw(self.device) for _ in range(sets)]
        ways = {name: way for name, way in row.ways.items() if not (self.is_dry and name == UNTRACED)}
        ms = {name: self._time_ms([partial(way, one) for one in tensors]) for name, way in ways.items()}
        error = None if checked is None else self._error(checked, None)
        ours = ms.get("ours", FAILED)
        cells = [f"{row.name:{width}}", *(f"{name} {self._text(time_ms)}" for name, time_ms in ms.items())]
        if not self.is_dry and ours < FAILED:
            rate = row.num_bytes / ours / 1e9
            cells.append(f"{rate:.2f} TB/s ({rate / self.peak:.0%})")
        if error is not None:
            cells.append(f"error {error:.1e}{'' if error < row.tolerance else ' WRONG'}")
        print("  ".join(cells), flush=True)
        figures: dict[str, Any] = {"name": row.name, "bytes": row.num_bytes, "ms": ms, "error": error}
        if self.sweep and row.ours is not None:
            figures["configs"] = self._sweep(row, checked, tensors)
        return figures

    def _sweep(self, row: Row, checked: Row | None, tensors: Sequence[Any]) -> list[tuple[str, float]]:
        """Milliseconds of each configuration, the fastest first; prints the best ones and those that are wrong."""
        assert row.ours is not None
        times: dict[Any, float] = {}
        for config in dict.fromkeys(row.configs):
            times[config] = self._time_ms([partial(row.ours, one, config) for one in tensors])
            if (
                times[config] < FAILED
                and checked is not None
                and (error := self._error(checked, config)) > row.tolerance
            ):
                print(f"    WRONG {config}: off by {error:.1e}", flush=True)
        best = sorted(times.items(), key=lambda item: item[1])
        for config, time_ms in best[:PRINTED_CONFIGS]:
            print(f"    {self._text(time_ms)} {config}{' (in use)' if config == row.configs[0] else ''}", flush=True)
        return [(str(config), time_ms) for config, time_ms in best]

    def _error(self, row: Row, config: Any) -> float:
        """The difference from the reference; infinite if a second call gives other bits."""
        assert row.error is not None
        tensors = row.draw(self.device)
        error = row.error(tensors, config)
        way, ours = row.ways.get("ours"), row.ours
        if way is not None:
            call = way if config is None or ours is None else lambda tensors: ours(tensors, config)
            first, second = ([leaf.clone() for leaf in _tensors(call(tensors))] for _ in range(2))
            if not all(torch.equal(a, b) for a, b in zip(first, second, strict=True)):
                error = FAILED
        self.is_right &= error < row.tolerance
        return error

    def _time_ms(self, calls: Sequence[Callable[[], object]]) -> float:
        """Milliseconds per call; infinite where a launch fails, such as for lack of shared memory."""
        try:
            return _run_ms(calls) if self.is_dry else _graph_ms(calls)
        except Exception as error:
            if self.is_dry:
                raise
            print(f"    failed: {repr(error)[:120]}", flush=True)
            return FAILED

    def _text(self, time_ms: float) -> str:
        return "ran" if self.is_dry else f"{time_ms:.4f} ms"

    def _print_sums(self, rows: Sequence[Row], figures: Sequence[dict[str, Any]]) -> None:
        """Milliseconds of all rows in a step of each network; a row without a way counts with its baseline."""
        ways = dict.fromkeys(name for one in figures for name in one["ms"])
        for network in dict.fromkeys(name for row in rows for name in row.counts):
            sums = dict.fromkeys(ways, 0.0)
            for row, one in zip(rows, figures, strict=True):
                baseline = next(iter(one["ms"].values()))
                for way in ways:
                    sums[way] += row.counts.get(network, 0) * one["ms"].get(way, baseline)
            words = ", ".join(f"{way} {self._text(time_ms)}" for way, time_ms in sums.items())
            print(f"a step of {network}: {words}", flush=True)


def _tensors(result: object) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def _run_ms(calls: Sequence[Callable[[], object]]) -> float:
    start_s = time.perf_counter()
    for call in calls:
        call()
    return 1e3 * (time.perf_counter() - start_s) / len(calls)


def _graph_ms(calls: Sequence[Callable[[], object]]) -> float:
    """The median of some replays of a CUDA graph of all calls."""
    _run_ms(calls)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    rounds = max(1, 8 // len(calls))
    with torch.cuda.graph(graph):
        for _ in range(rounds):
            _run_ms(calls)
    graph.replay()
    times = []
    for _ in range(REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / (rounds * len(calls)))
    return float(median(times))
