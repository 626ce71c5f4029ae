"""Timing steps and their parts.

The device is synchronized only at the ends of a window of steps, so that the host runs ahead as it does in training.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Protocol

import torch

from reconv.core.batch import Batch
from reconv.device import Device

WINDOW_S = 0.5  # the length of a window whose number of steps is not given
MAX_STEPS = 100  # in such a window
INPUT = "input"
PARTS = ("forward", "backward", "optimizer", INPUT)

Step = Callable[[int, Sequence[Batch]], object]


class StepLoader(Protocol):
    """A loader of the micro-batches of each step."""

    def steps(self, start: int, stop: int) -> Iterator[Sequence[Batch]]: ...


@dataclass(frozen=True, slots=True)
class TimingConfig:
    """Amount to measure; `steps` per window, None: as many as make a window long enough."""

    windows: int = 7
    steps: int | None = None
    warmup: int = 5


@dataclass(frozen=True, slots=True)
class Timings:
    """The mean time of a step in each window."""

    step_s: tuple[float, ...]
    steps: int  # in each window
    first_step_at_s: float  # time.time() after the first step
    parts_s: dict[str, float]  # of a step, mean over all windows; empty where they cannot be measured

    def step_ms(self) -> dict[str, float | None]:
        """Median, 95th percentile and parts in milliseconds."""
        parts = {name: 1000 * self.parts_s[name] if self.parts_s else None for name in PARTS}
        return {"median": 1000 * self.median_s, "p95": 1000 * percentile(self.step_s, 95), **parts}

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """The percentile of the values, interpolated linearly."""
    ordered = sorted(values)
    position = (len(ordered) - 1) * percent / 100
    low = int(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(slots=True)
class StepTimer:
    """Times the parts of a step: with CUDA events, or on the CPU with the host's clock; not on other devices."""

    device: Device
    _times: list[tuple[str, Callable[[], float]]] = field(default_factory=list)
    _captured: list[tuple[str, Callable[[], float]]] = field(
        default_factory=list
    )  # in a CUDA graph: of its last replay

    @property
    def can_measure(self) -> bool:
        """True if the parts of a step can be timed on this device."""
        return self.device.kind in ("cpu", "cuda")

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """Time what runs inside; the wait for input is host time on every device."""
        if not self.can_measure:
            return nullcontext()
        return self._device_time(name) if self.device.kind == "cuda" and name != INPUT else self._host_time(name)

    def clear(self) -> None:
        """Drop all times so far."""
        self._times.clear()

    @property
    def has_captured(self) -> bool:
        """True if parts are timed inside a CUDA graph, where each replay overwrites the times of the one before."""
        return bool(self._captured)

    def read_captured(self) -> None:
        """Read the times of the last replay of a CUDA graph, which the device must have finished."""
        for name, read_s in self._captured:
            seconds = read_s()
            self._times.append((name, lambda seconds=seconds: seconds))  # type: ignore[misc]

    def seconds(self, num_steps: int) -> dict[str, float]:
        """The mean time of each part over `num_steps` steps, which the device must have finished."""
        if not self.can_measure:
            return {}
        total_s = dict.fromkeys(PARTS, 0.0)
        for name, read_s in self._times:
            total_s[name] += read_s()
        return {name: seconds / num_steps for name, seconds in total_s.items()}

    @contextmanager
    def _device_time(self, name: str) -> Iterator[None]:
        is_captured = torch.cuda.is_current_stream_capturing()
        start, end = (torch.cuda.Event(enable_timing=True, external=is_captured) for _ in range(2))
        start.record()
        yield
        end.record()
        times = self._captured if is_captured else self._times
        times.append((name, lambda: start.elapsed_time(end) / 1000))

    @contextmanager
    def _host_time(self, name: str) -> Iterator[None]:
        start_s = time.perf_counter()
        yield
        seconds = time.perf_counter() - start_s
        self._times.append((name, lambda: seconds))


def measure(
    step: Step,
    loader: StepLoader,
    device: Device,
    config: TimingConfig,
    timer: StepTimer,
    broadcast: Callable[[int], int] = lambda num_steps: num_steps,
) -> Timings:
    """Warm up, then time windows of steps with their input; with several ranks, rank 0 chooses the window's length."""
    stream = loader.steps(0, sys.maxsize)
    number = 0

    def run(num_steps: int) -> float:
        nonlocal number
        start_s = time.perf_counter()
        for _ in range(num_steps):
            with timer.annotate(INPUT):
                micro_batches = next(stream)
            step(number, micro_batches)
            number += 1
        device.synchronize()
        return time.perf_counter() - start_s

    run(1)
    first_step_at_s = time.time()
    last_s = 0.0
    for _ in range(config.warmup):
        last_s = run(1)
    num_steps = broadcast(config.steps or max(1, min(MAX_STEPS, round(WINDOW_S / max(last_s, 1e-9)))))
    timer.clear()
    step_s = tuple(run(num_steps) / num_steps for _ in range(config.windows))
    parts_s = timer.seconds(num_steps * config.windows)
    if timer.has_captured:  # in separate steps, one replay at a time
        timer.clear()
        for _ in range(num_steps):
            run(1)
            timer.read_captured()
        parts_s |= {name: s for name, s in timer.seconds(num_steps).items() if name != INPUT}
    return Timings(step_s, num_steps, first_step_at_s, parts_s)
