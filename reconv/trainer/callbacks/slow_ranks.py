"""Names a rank that slows all others down, while the run goes on.

The steps of all ranks take equally long, because they wait for each other. What differs is the time that a rank needs
for itself: waiting for its data, and its forward passes. Each rank measures it without waiting for its device, sends
the mean of ten seconds with its heartbeat, and rank 0 compares. Ranks exchange nothing more than before.
"""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from reconv.core.batch import Batch, TimingEvent
from reconv.distributed.process_group import Pace, ProcessGroup
from reconv.logging.clock import RunClock
from reconv.logging.events import SlowRank
from reconv.logging.run_logger import RunLogger
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import Annotate, StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer

SLOW_FACTOR = 1.3  # times the median of the ranks
MIN_STEP_FRACTION = 0.1  # of the time of a step; less than that is not worth a look at a machine
WINDOW_S = 10.0
_WARMUP_STEPS = 5  # fill caches and compile
_NUM_WINDOWS = 2  # in a row, before a rank is named


@dataclass(slots=True)
class SlowRankLogger(TrainerCallback):
    """Sends the pace of this rank; rank 0 logs ranks that are slow."""

    process_group: ProcessGroup
    clock: RunClock
    logger: RunLogger
    record_event: Callable[[], TimingEvent | None]
    inner: Annotate
    now: Callable[[], float] = time.monotonic
    is_timed: bool = True  # a captured step launches no forward pass of its own: then only data waits are compared
    _forward_s: float = 0.0
    _events: deque[tuple[TimingEvent, TimingEvent]] = field(default_factory=deque)
    _num_steps: int = 0
    _began_s: float = 0.0
    _began_wait_s: float = 0.0
    _num_slow: dict[int, int] = field(default_factory=dict)  # windows in a row
    _compared: dict[int, Pace] = field(default_factory=dict)

    def annotate(self, name: str) -> AbstractContextManager[None]:
        """The `Annotate` of the training step."""
        if name != "forward" or not self.is_timed:
            return self.inner(name)
        return self._timed(self.inner(name))

    @contextmanager
    def _timed(self, inner: AbstractContextManager[None]) -> Iterator[None]:
        began_s, began = time.perf_counter(), self.record_event()
        with inner:
            yield
        ended = self.record_event()
        if began is None or ended is None:  # the host waits for the device
            self._forward_s += time.perf_counter() - began_s
        else:
            self._events.append((began, ended))

    def on_fit_start(self, trainer: Trainer) -> None:
        self.is_timed = trainer.step.graphs is None

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        self._num_steps += 1
        while self._events and self._events[0][1].query():
            began, ended = self._events.popleft()
            self._forward_s += began.elapsed_time(ended) / 1000
        window_s = self.now() - self._began_s
        if self._began_s == 0.0:
            if self._num_steps >= _WARMUP_STEPS:
                self._start_window()
            return
        if window_s < WINDOW_S:
            return
        wait_s = max(0.0, self.clock.wait_s - self._began_wait_s)
        pace = Pace(wait_s / self._num_steps, self._forward_s / self._num_steps)
        self.process_group.set_pace(pace)
        if self.process_group.is_rank0:
            self._compare(self.process_group.paces(), window_s / self._num_steps, step + 1)
        self._start_window()

    def _start_window(self) -> None:
        self._began_s, self._began_wait_s = self.now(), self.clock.wait_s
        self._num_steps, self._forward_s = 0, 0.0

    def _compare(self, paces: Mapping[int, tuple[str, Pace]], step_s: float, step: int) -> None:
        if len(paces) < self.process_group.world_size:
            return
        own = {rank: pace for rank, (_, pace) in paces.items()}
        # A heartbeat may bring a window late, and then the one before it is there twice.
        new = {rank for rank, pace in own.items() if pace != self._compared.get(rank)}
        self._compared = own
        slow = slow_ranks(own, step_s)
        self._num_slow = {rank: self._num_slow.get(rank, 0) + (rank in new) for rank in slow}
        median_s = statistics.median_low(pace.local_s for pace in own.values())
        for rank in new.intersection(slow):
            if self._num_slow[rank] == _NUM_WINDOWS:
                host, pace = paces[rank]
                self.logger.log(SlowRank(step, rank, host, pace.wait_s, pace.forward_s, median_s, step_s))


def slow_ranks(paces: Mapping[int, Pace], step_s: float) -> list[int]:
    """The ranks that need much more time for themselves than the median one; `step_s` is the time of a step."""
    median_s = statistics.median_low(pace.local_s for pace in paces.values())
    limit_s = max(SLOW_FACTOR * median_s, median_s + MIN_STEP_FRACTION * step_s)
    return [rank for rank, pace in paces.items() if pace.local_s > limit_s]
