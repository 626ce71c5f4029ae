"""Training throughput and remaining time, with and without the time spent waiting for data.

Time counts either as a step or as a pause; waiting is part of its step; the first steps are not timed. While the host
fetches a batch, a GPU may still be busy with the step before: only the time in which it had nothing to do is a wait.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from reconv.core.batch import TimingEvent
from reconv.logging.phases import Phase, PhaseTimer

# The first steps fill caches, allocate memory and compile.
_WARMUP_STEPS = 3


@dataclass(frozen=True, slots=True)
class ThroughputRates:
    """Throughput over an interval; the rates are None if no step of it was timed."""

    images_per_s: float | None
    compute_images_per_s: float | None
    data_wait_fraction: float


@dataclass(frozen=True, slots=True)
class _Fetch:
    """The fetch of a batch by the host, and what the device did meanwhile."""

    step: int
    host_s: float
    step_ended: TimingEvent  # the work on the step before
    step_begins: TimingEvent  # the work on the step that the batch is for

    def overlap_s(self) -> float:
        """Seconds of the fetch during which the device was busy."""
        idle_s = self.step_ended.elapsed_time(self.step_begins) / 1000
        return max(0.0, self.host_s - idle_s)


class RunClock:
    """Measures throughput, data waits and the remaining time of a run, and assigns their time to `phases`.

    `record_event` marks a moment in the work of the device; None: the host waits for the device after every step.
    """

    def __init__(
        self,
        warmup_steps: int = _WARMUP_STEPS,
        now: Callable[[], float] = time.perf_counter,
        phases: PhaseTimer | None = None,
        record_event: Callable[[], TimingEvent | None] = lambda: None,
    ) -> None:
        self.phases = phases or PhaseTimer(now=now)
        self.startup_s: float | None = None  # from the start of `phases` to the end of the first step
        self._now = now
        self._record_event = record_event
        self._step_ended: TimingEvent | None = None
        self._fetches: deque[_Fetch] = deque()  # of which it is not known yet how busy the device was
        self._warmup_steps = warmup_steps
        self._mark_s = now()
        self._warm_s: float | None = self._mark_s if warmup_steps == 0 else None  # end of the warm-up
        self._step_wait_s = self._step_pause_s = 0.0
        self._steps = 0
        self._timed_images = self._interval_images = 0
        self._train_s = self._interval_train_s = 0.0
        self._wait_s = self._interval_wait_s = 0.0

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Count the time inside as waiting for data, within the current step."""
        began_s = self._now()
        try:
            with self.phases.during(Phase.DATA_WAIT if self._steps else Phase.FIRST_STEP):
                yield
        finally:
            host_s = self._now() - began_s
            self._step_wait_s += host_s
            if self._step_ended is not None and (step_begins := self._record_event()) is not None:
                self._fetches.append(_Fetch(self._steps, host_s, self._step_ended, step_begins))

    @contextmanager
    def paused(self, phase: Phase) -> Iterator[None]:
        """Exclude the time inside (an evaluation, a save) from the current step; it is that of `phase`."""
        began_s = self._now()
        try:
            with self.phases.during(phase):
                yield
        finally:
            self._step_pause_s += self._now() - began_s

    def count_step(self, images: int) -> None:
        """A step over `images` images has ended, and the next one starts."""
        now_s = self._now()
        self._step_ended = self._record_event()
        self._steps += 1
        if self.startup_s is None:
            self.startup_s = self.phases.elapsed_s
            self.phases.enter(Phase.TRAINING)
        if self._steps > self._warmup_steps:
            train_s = now_s - self._mark_s - self._step_pause_s
            self._timed_images += images
            self._interval_images += images
            self._train_s += train_s
            self._interval_train_s += train_s
            self._wait_s += self._step_wait_s
            self._interval_wait_s += self._step_wait_s
        elif self._steps == self._warmup_steps:
            self._warm_s = now_s
        self._mark_s = now_s
        self._step_wait_s = self._step_pause_s = 0.0
        self._subtract_overlaps()

    def _subtract_overlaps(self) -> None:
        """Count as training what was counted as waiting although the device was busy, where that is known by now."""
        while self._fetches and self._fetches[0].step_begins.query():
            fetch = self._fetches.popleft()
            overlap_s = fetch.overlap_s()
            self.phases.move(Phase.DATA_WAIT, Phase.TRAINING, overlap_s)
            if fetch.step >= self._warmup_steps:
                self._wait_s -= overlap_s
                self._interval_wait_s -= overlap_s

    def interval(self) -> ThroughputRates:
        """The rates since the last call."""
        rates = rates_of(self._interval_images, self._interval_train_s, self._interval_wait_s)
        self._interval_images = 0
        self._interval_train_s = self._interval_wait_s = 0.0
        return rates

    @property
    def train_s(self) -> float:
        """Seconds spent in timed steps."""
        return self._train_s

    @property
    def wait_s(self) -> float:
        """Seconds of `train_s` spent waiting for data."""
        self._subtract_overlaps()
        return self._wait_s

    @property
    def timed_images(self) -> int:
        """Images trained on in `train_s`."""
        return self._timed_images

    def eta_s(self, images_left: int) -> float | None:
        """The estimated time for the remaining images, pauses included; None during warm-up."""
        if self._warm_s is None or self._timed_images == 0:
            return None
        return (self._mark_s - self._warm_s) / self._timed_images * images_left


def rates_of(images: int, train_s: float, wait_s: float) -> ThroughputRates:
    """The rates of sums; None for a time of zero."""
    wait_s = max(0.0, wait_s)  # what an interval subtracts may belong to the last step of the one before
    compute_s = train_s - wait_s
    return ThroughputRates(
        images_per_s=images / train_s if train_s > 0 else None,
        compute_images_per_s=images / compute_s if compute_s > 0 else None,
        data_wait_fraction=min(1.0, wait_s / train_s) if train_s > 0 else 0.0,
    )
