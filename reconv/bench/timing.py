"""Windows of steps and the parts inside them, timed.

Owns when a clock is read, and medians. Refuses to know what a step does. Invariant: the device is waited for only at
the ends of a window, so that the host runs ahead of it as in training; warm-up counts in no number.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch

from reconv.batch import Batch
from reconv.device import Device
from reconv.trainer.protocols import TrainBatches

WINDOW_S = 0.5  # what a window should last, where the number of its steps is not given
MOST_STEPS = 100  # of a window whose steps are not counted by the caller
INPUT = "input"
PARTS = ("forward", "backward", "optimizer", INPUT)

Step = Callable[[int, Sequence[Batch]], object]


@dataclass(frozen=True, slots=True)
class Wish:
    """How much is measured; `steps` None: as many as make a window long enough."""

    windows: int = 7
    steps: int | None = None
    warmup: int = 5


@dataclass(frozen=True, slots=True)
class Windows:
    """The mean time of a step in each window."""

    step_s: tuple[float, ...]
    steps: int  # in each window
    first_step_at_s: float  # time.time() when the first step was done
    parts_s: dict[str, float]  # of one step, over all windows; empty where they cannot be told apart

    def step_ms(self) -> dict[str, float | None]:
        """The contract's split of a step."""
        parts = {name: 1000 * self.parts_s[name] if self.parts_s else None for name in PARTS}
        return {"median": 1000 * self.median_s, "p95": 1000 * percentile(self.step_s, 95), **parts}

    @property
    def median_s(self) -> float:
        return statistics.median(self.step_s)


def percentile(values: Sequence[float], percent: float) -> float:
    """The value below which so many percent lie, interpolated between neighbours."""
    ordered = sorted(values)
    place = (len(ordered) - 1) * percent / 100
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


@dataclass(slots=True)
class Marks:
    """The times of a step's parts: by the device's own clock on CUDA, by the host's on the CPU.

    Other devices run behind the host and have no clock to ask here: their parts are not told apart.
    """

    device: Device
    _taken: list[tuple[str, Callable[[], float]]] = field(default_factory=list)
    _recorded: list[tuple[str, Callable[[], float]]] = field(default_factory=list)  # in a graph: of its last launch

    @property
    def can_tell(self) -> bool:
        """Whether this device's parts can be timed."""
        return self.device.kind in ("cpu", "cuda")

    def mark(self, name: str) -> AbstractContextManager[None]:
        """Time what happens inside; waiting for input is the host's time on every device."""
        if not self.can_tell:
            return nullcontext()
        return self._by_device(name) if self.device.kind == "cuda" and name != INPUT else self._by_host(name)

    def clear(self) -> None:
        """Forget what was taken so far."""
        self._taken.clear()

    @property
    def has_recorded(self) -> bool:
        """Whether parts are marked inside a graph, whose launches overwrite each other's times."""
        return bool(self._recorded)

    def take_recorded(self) -> None:
        """Take the times of a graph's last launch, which the device must have finished."""
        for name, spent_s in self._recorded:
            taken_s = spent_s()
            self._taken.append((name, lambda taken_s=taken_s: taken_s))  # type: ignore[misc]

    def seconds(self, num_steps: int) -> dict[str, float]:
        """The parts of one of so many steps; the device must have finished them."""
        if not self.can_tell:
            return {}
        total_s = dict.fromkeys(PARTS, 0.0)
        for name, spent_s in self._taken:
            total_s[name] += spent_s()
        return {name: spent_s / num_steps for name, spent_s in total_s.items()}

    @contextmanager
    def _by_device(self, name: str) -> Iterator[None]:
        is_recorded = torch.cuda.is_current_stream_capturing()
        began, ended = (torch.cuda.Event(enable_timing=True, external=is_recorded) for _ in range(2))
        began.record()
        yield
        ended.record()
        taken = self._recorded if is_recorded else self._taken
        taken.append((name, lambda: began.elapsed_time(ended) / 1000))

    @contextmanager
    def _by_host(self, name: str) -> Iterator[None]:
        began_s = time.perf_counter()
        yield
        spent_s = time.perf_counter() - began_s
        self._taken.append((name, lambda: spent_s))


def measure(
    step: Step,
    batches: TrainBatches,
    device: Device,
    wish: Wish,
    marks: Marks,
    agree: Callable[[int], int] = lambda num_steps: num_steps,
) -> Windows:
    """Warm up, then time whole windows of steps with their input; several processes `agree` on a window's steps."""
    stream = batches.steps(0, sys.maxsize)
    number = 0

    def run(num_steps: int) -> float:
        nonlocal number
        began_s = time.perf_counter()
        for _ in range(num_steps):
            with marks.mark(INPUT):
                micro_batches = next(stream)
            step(number, micro_batches)
            device.step_boundary()
            number += 1
        device.synchronize()
        return time.perf_counter() - began_s

    run(1)
    first_step_at_s = time.time()
    last_s = 0.0
    for _ in range(wish.warmup):
        last_s = run(1)
    num_steps = agree(wish.steps or max(1, min(MOST_STEPS, round(WINDOW_S / max(last_s, 1e-9)))))
    marks.clear()
    step_s = tuple(run(num_steps) / num_steps for _ in range(wish.windows))
    parts_s = marks.seconds(num_steps * wish.windows)
    if marks.has_recorded:  # one launch at a time, for the parts alone
        marks.clear()
        for _ in range(num_steps):
            run(1)
            marks.take_recorded()
        parts_s |= {name: s for name, s in marks.seconds(num_steps).items() if name != INPUT}
    return Windows(step_s, num_steps, first_step_at_s, parts_s)


def process_age_s() -> float | None:
    """How long this process has lived; None where the system does not say."""
    stat, uptime = Path("/proc/self/stat"), Path("/proc/uptime")
    if not stat.exists():
        return None
    started_ticks = int(stat.read_text().rpartition(")")[2].split()[19])
    return float(uptime.read_text().split()[0]) - started_ticks / os.sysconf("SC_CLK_TCK")
