"""Timing of the stages that make batches: disk, decode, augment and copy, per task and summed over a run."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Literal

Stage = Literal["disk", "decode", "augment", "copy"]
STAGES: tuple[Stage, ...] = ("disk", "decode", "augment", "copy")
_REMAINDER: Stage = "augment"  # whatever a task does to an image once it is decoded

Seconds = Mapping[Stage, float]


class _CurrentTask(threading.local):
    seconds: dict[Stage, float] | None = None  # None: this thread runs no task that is timed


_current = _CurrentTask()


def record_stage(stage: Stage, began_s: float) -> float:
    """Add the time since `began_s` to a stage of this thread's task; the time now."""
    now_s = time.perf_counter()
    if _current.seconds is not None:
        _current.seconds[stage] = _current.seconds.get(stage, 0.0) + now_s - began_s
    return now_s


def timed(task: Callable[[], None]) -> dict[Stage, float]:
    """Run a task; the seconds of its stages, which add up to the time it took."""
    seconds: dict[Stage, float] = {}
    _current.seconds = seconds
    began_s = time.perf_counter()
    try:
        task()
    finally:
        _current.seconds = None
    seconds[_REMAINDER] = time.perf_counter() - began_s - sum(seconds.values()) + seconds.get(_REMAINDER, 0.0)
    return seconds


class StageTimes:
    """The seconds of each stage, summed over all workers; add from one thread only."""

    def __init__(self) -> None:
        self._seconds: dict[Stage, float] = dict.fromkeys(STAGES, 0.0)

    def add(self, seconds: Seconds) -> None:
        for stage, value in seconds.items():
            self._seconds[stage] += value

    @property
    def seconds(self) -> dict[str, float]:
        return {stage: self._seconds[stage] for stage in STAGES}
