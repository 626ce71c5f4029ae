"""Stopping a run by signal: stop signals set a flag that the training loop checks between steps.

The first signal decides the message. A second Ctrl-C interrupts at once, without a checkpoint; further signals of other
kinds change nothing, so that a scheduler that sends several does not end the save. The previous handlers are restored
at the end.

Ranks agree on a stop by an all-reduce that overlaps the next step, so all of them stop after the same one
(tests/faults/test_stop_signals_end_to_end.py).
"""

from __future__ import annotations

import math
import re
import signal
import threading
import time
from dataclasses import dataclass, field
from fractions import Fraction
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any

from reconv.core.errors import UsageError
from reconv.core.stop_signals import handled_stop_signals

if TYPE_CHECKING:
    from reconv.recipe.plan import Plan


class StopSignal:
    """A context manager that turns signals into a flag."""

    def __init__(self, same_press_s: float = 0.5) -> None:
        """Two SIGINTs within `same_press_s` are one Ctrl-C: from the terminal, and forwarded by torchrun."""
        self.signal_number: int | None = None  # the first one
        self._same_press_s = same_press_s
        self._interrupted_s: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def request(self, number: int = signal.SIGTERM) -> None:
        """Request a stop after the current step, as a signal would."""
        self.signal_number = number

    def __enter__(self) -> StopSignal:
        # Python allows signal handlers in the main thread only.
        if threading.current_thread() is threading.main_thread():
            for number in handled_stop_signals():
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: not installed by Python

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted_s is None:
                self._interrupted_s = time.monotonic()
            elif time.monotonic() - self._interrupted_s >= self._same_press_s:
                raise KeyboardInterrupt
        self.signal_number = self.signal_number or number  # --devices forwards Ctrl-C as SIGTERM


_PATTERN = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(step|ep|s|min|h)s?\s*")
_POINT = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(step|ep|%)s?\s*")
_MAX_NUMBER = 1e15
_SECONDS = {"s": 1.0, "min": 60.0, "h": 3600.0}


def point_step(text: str, total_steps: int, steps_per_epoch: float) -> int:
    """The step of a point of a run, `25%`, `2ep` or `500step`, at least 1 and at most the last one."""
    match = _POINT.fullmatch(text)
    number, unit = (Fraction(match[1]), match[2]) if match else (Fraction(0), "")
    if not 0 < number < _MAX_NUMBER or (unit == "step" and number.denominator != 1) or (unit == "%" and number > 100):
        raise UsageError(
            f"--stop-at takes a point of the run, not {text!r:.80}", hint="for example --stop-at 25%, 2ep or 500step"
        )
    steps = {"%": number * total_steps / 100, "ep": number * Fraction(steps_per_epoch), "step": number}[unit]
    return min(max(1, math.ceil(steps)), total_steps)


@dataclass(frozen=True, slots=True)
class StopAfter:
    """Limit on a command's training: a step of the run or a time from its start; None: to the end of the run."""

    text: str = ""  # as typed
    option: str = "--stop-after"
    step: int | None = None  # number of steps of the run after which to stop
    seconds: float | None = None
    start_s: float = field(default_factory=time.monotonic)

    @classmethod
    def at(cls, text: str, plan: Plan) -> StopAfter:
        """The limit that `25%`, `2ep` or `500step` of the whole run sets: the first evaluation there or later."""
        first, total = point_step(text, plan.total_steps, plan.steps_per_epoch), plan.total_steps
        schedule = plan.evaluate
        if schedule is None:
            return cls(text.strip(), "--stop-at", first)
        step = next((n for n in range(first, total) if schedule.due(n, total)), total)
        return cls(text.strip(), "--stop-at", step)

    @classmethod
    def parse(cls, text: str | None, *, first_step: int, steps_per_epoch: float) -> StopAfter:
        """The limit that `100step`, `2ep`, `30min` or `3h` sets on a run that starts or continues at a step."""
        if text is None:
            return cls()
        match = _PATTERN.fullmatch(text)
        number, unit = (float(match[1]), match[2]) if match else (0.0, "")
        if not 0 < number < _MAX_NUMBER or (unit == "step" and number != int(number)):
            raise UsageError(
                f"--stop-after takes a number of steps or epochs or a time, not {text!r:.80}",
                hint="for example --stop-after 100step, 2ep, 30min or 3h",
            )
        if unit in _SECONDS:
            return cls(text.strip(), seconds=number * _SECONDS[unit])
        steps = number if unit == "step" else number * steps_per_epoch
        return cls(text.strip(), step=first_step + max(1, math.ceil(steps)))

    def is_reached(self, step: int) -> bool:
        """True if the limit in steps is reached; every rank finds the same."""
        return self.step is not None and step >= self.step

    def time_is_up(self) -> bool:
        """True if the limit in time is reached on this rank."""
        return self.seconds is not None and time.monotonic() - self.start_s >= self.seconds
