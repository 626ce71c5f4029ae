"""Stopping a run by signal: stop signals set a flag that the training loop checks between steps.

The first signal decides the message. A second Ctrl-C interrupts at once, without a checkpoint; further signals of other
kinds change nothing, so that a scheduler that sends several does not end the save. The previous handlers are restored
at the end.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any

from reconv.core.stop_signals import handled_stop_signals


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
