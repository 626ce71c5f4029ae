"""Where the time of making batches goes: reading, decoding, augmenting, copying.

Owns the counting, per task in the worker and summed for a run. Refuses to know who waits and what would help.
Invariant: every second of a task is counted once, and a task costs two reads of a clock more than it would.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

Stage = Literal["disk", "decode", "augment", "copy"]
STAGES: tuple[Stage, ...] = ("disk", "decode", "augment", "copy")
_REST: Stage = "augment"  # of a task: whatever is done to an image once it is decoded

Seconds = Mapping[Stage, float]


class _Task(threading.local):
    """The seconds that the running task of this thread has counted so far."""

    seconds: dict[Stage, float] | None = None


_task = _Task()


def spent(stage: Stage, since_s: float) -> float:
    """Count the time since a moment for a stage of the running task, and return the moment now."""
    now_s = time.perf_counter()
    if _task.seconds is not None:
        _task.seconds[stage] = _task.seconds.get(stage, 0.0) + now_s - since_s
    return now_s


def timed(task: Callable[[], None]) -> dict[Stage, float]:
    """Run a task and return the seconds of each of its stages."""
    seconds: dict[Stage, float] = {}
    _task.seconds = seconds
    began_s = time.perf_counter()
    try:
        task()
    finally:
        _task.seconds = None
    seconds[_REST] = time.perf_counter() - began_s - sum(seconds.values()) + seconds.get(_REST, 0.0)
    return seconds


class StageTimes:
    """The seconds of each stage, summed over all workers; told from one thread."""

    def __init__(self) -> None:
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    def add(self, seconds: Seconds) -> None:
        for stage, value in seconds.items():
            self._seconds[stage] += value

    @property
    def seconds(self) -> dict[str, float]:
        """The sums so far."""
        return {stage: self._seconds[stage] for stage in STAGES}
