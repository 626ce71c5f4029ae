"""A trace of some steps: what the operators did when, for a timeline viewer, and where the steps' time went.

Owns the profiler and the arithmetic of its table. Refuses to know what a step does: it wraps the step and the stream
of batches from outside, and the step names its own parts through `mark`. Invariant: no number of the run depends on
whether it is traced; outside the range nothing is measured.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

from reconv.batch import Batch
from reconv.logging.run_logger import RunLogger
from reconv.trainer.protocols import DeviceProtocol, TrainBatches
from reconv.trainer.step import StepResult
from reconv.trainer.trainer import Step

DATA_WAIT = "data wait"
NUM_OPERATORS = 10


@dataclass(slots=True)
class StepProfiler:
    """Steps `first` to `last`, counted from 1 and both included, traced into a file."""

    first: int
    last: int
    folder: Path
    device: DeviceProtocol
    logger: RunLogger
    paused: Callable[[], AbstractContextManager[Any]] = nullcontext  # what the trace itself costs is not the step's
    _profiler: Any = None
    _began_s: float = 0.0
    _from_step: int = 0
    _last_step: int = 0
    _parts: list[tuple[str, Callable[[], float]]] = field(default_factory=list)

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Name what happens inside, while a traced step runs."""
        return self._timed(name) if self._profiler is not None else nullcontext()

    def batches(self, inner: TrainBatches) -> TrainBatches:
        """The same stream; waiting for the batches of traced steps is measured."""
        return _TracedBatches(inner, self)

    def step(self, inner: Step) -> Step:
        """The same step; the profiler ends after the last one of the range."""

        def traced(step: int, micro_batches: Sequence[Batch]) -> StepResult:
            result = inner(step, micro_batches)
            if self._profiler is not None:
                self._last_step = step + 1
                if step + 1 == self.last:
                    self.close()
            return result

        return traced

    def fetching(self, step: int) -> None:
        """The batches of a step (counted from 0) are about to be asked for."""
        if self._profiler is None and self.first <= step + 1 <= self.last:
            self._from_step = step + 1
            with self.paused():
                self._start()

    def close(self) -> None:
        """End the trace, if one is under way, and write what it holds; harmless when called twice."""
        try:
            with self.paused():
                self._finish()
        except OSError as error:  # a full disk must not end the run that is measured
            self.logger.warning(f"the trace could not be written: {error}", self._last_step)

    def _finish(self) -> None:
        profiler, self._profiler = self._profiler, None
        if profiler is None:
            return
        self.device.synchronize()
        wall_s = time.perf_counter() - self._began_s
        profiler.stop()
        num_steps = self._last_step - self._from_step + 1
        if num_steps <= 0:
            return  # stopped before the first traced step was done
        self.folder.mkdir(parents=True, exist_ok=True)
        name = f"steps-{self._from_step}-{self._last_step}"
        profiler.export_chrome_trace(str(self.folder / f"{name}.json"))
        text = "\n".join(self._table(profiler, wall_s, num_steps))
        (self.folder / f"{name}.txt").write_text(text + "\n", encoding="utf-8")
        where = self.folder / f"{name}.json"
        self.logger.info(f"{text}\ntrace: {where} (open it in https://ui.perfetto.dev)", self._last_step)

    def _start(self) -> None:
        activities = [ProfilerActivity.CPU]
        if self.device.kind == "cuda":
            activities.append(ProfilerActivity.CUDA)
        self.device.synchronize()
        profiler = profile(activities=activities)
        profiler.start()
        self._profiler = profiler
        self._parts.clear()
        self._began_s = time.perf_counter()

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        with record_function(name):
            # Waiting for data is the host's time; the rest is the device's, read from its own clock so that the
            # host is never made to wait and the trace shows the step as it is.
            if self.device.kind == "cuda" and name != DATA_WAIT:
                began, ended = (torch.Event("cuda", enable_timing=True) for _ in range(2))
                began.record()
                yield
                ended.record()
                self._parts.append((name, lambda: began.elapsed_time(ended) / 1000))
            else:
                began_s = time.perf_counter()
                yield
                spent_s = time.perf_counter() - began_s
                self._parts.append((name, lambda: spent_s))

    def _table(self, profiler: Any, wall_s: float, num_steps: int) -> list[str]:
        """Where the steps' time went: their parts, then the operators that took most."""
        parts: dict[str, float] = {}
        for name, read_s in self._parts:
            parts[name] = parts.get(name, 0.0) + read_s()
        rest_s = wall_s - sum(parts.values())
        rows = [*parts.items(), ("everything else", max(0.0, rest_s))]
        steps = f"step {self._from_step}" if num_steps == 1 else f"steps {self._from_step} to {self._last_step}"
        on_device = self.device.kind == "cuda"
        lines = [f"{steps}: {1000 * wall_s / num_steps:.2f} ms a step"]
        lines += [_row(name, spent_s, wall_s, num_steps) for name, spent_s in rows]
        found = _operators(profiler, set(parts), on_device)
        total_s = sum(spent_s for _, spent_s, _ in found)
        where = "device" if on_device else "CPU"
        lines.append(f"operators by {where} time, {1000 * total_s / num_steps:.2f} ms a step in all:")
        lines += [
            f"{_row(name, spent_s, total_s, num_steps)}  x {calls / num_steps:g}"
            for name, spent_s, calls in found[:NUM_OPERATORS]
        ]
        return lines


def _row(name: str, spent_s: float, total_s: float, num_steps: int) -> str:
    share = spent_s / total_s if total_s > 0 else 0.0
    return f"  {name:<40} {1000 * spent_s / num_steps:9.2f} ms  {share:6.1%}"


def _operators(profiler: Any, parts: set[str], on_device: bool) -> list[tuple[str, float, int]]:
    """Operators by the time spent in themselves, the greatest first: name, seconds, calls."""
    found = [
        (str(e.key), (e.self_device_time_total if on_device else e.self_cpu_time_total) / 1e6, int(e.count))
        for e in profiler.key_averages()
        if e.key not in parts
    ]
    return sorted((o for o in found if o[1] > 0), key=lambda operator: -operator[1])


@dataclass(frozen=True, slots=True)
class _TracedBatches:
    inner: TrainBatches
    trace: StepProfiler

    def steps(self, start: int, stop: int) -> Iterator[Sequence[Batch]]:
        stream = self.inner.steps(start, stop)
        for step in range(start, stop):
            self.trace.fetching(step)
            with self.trace.mark(DATA_WAIT):
                micro_batches = next(stream)
            yield micro_batches
