"""Asking a run to stop: SIGTERM and Ctrl-C set a flag that the loop reads between steps.

Owns the signal handlers while a run lasts. Refuses to know what is saved. Invariant: a handler only sets a flag; a
second Ctrl-C interrupts at once; the previous handlers come back.
"""

from __future__ import annotations

import signal
import threading
import time
from types import FrameType, TracebackType
from typing import Any


class StopSignal:
    """The flag, as a context manager around the run."""

    def __init__(self, same_press_s: float = 0.5) -> None:
        """One Ctrl-C may come twice within `same_press_s`: from the terminal, and from torchrun, which passes it on."""
        self.signal_number: int | None = None  # the first that came
        self._same_press_s = same_press_s
        self._interrupted_s: float | None = None
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask for a stop at the next step, as a signal would."""
        self.signal_number = number

    def __enter__(self) -> StopSignal:
        # Python delivers signals to the main thread only; a run started elsewhere is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT:
            if self._interrupted_s is None:
                self._interrupted_s = time.monotonic()
            elif time.monotonic() - self._interrupted_s >= self._same_press_s:
                raise KeyboardInterrupt
        self.signal_number = self.signal_number or number  # --devices passes Ctrl-C on as a SIGTERM
