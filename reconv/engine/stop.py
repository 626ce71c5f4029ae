"""Asking a run to stop: SIGTERM and Ctrl-C set a flag that the loop reads between steps.

Owns the signal handlers while a run lasts. Refuses to know what is saved. Invariant: a handler only sets a flag; a
second Ctrl-C interrupts at once; the previous handlers come back.
"""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class StopRequest:
    """The flag, as a context manager around the run."""

    def __init__(self) -> None:
        self.signal_number: int | None = None  # the first that came
        self._is_interrupted = False
        self._previous: dict[int, Any] = {}

    @property
    def requested(self) -> bool:
        return self.signal_number is not None

    def request(self, number: int = signal.SIGTERM) -> None:
        """Ask for a stop at the next step, as a signal would."""
        self.signal_number = number

    def __enter__(self) -> StopRequest:
        # Python delivers signals to the main thread only; a run started elsewhere is stopped by its owner.
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGTERM, signal.SIGINT):
                self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGINT and self._is_interrupted:
            raise KeyboardInterrupt
        # Ctrl-C comes with a SIGTERM from whoever started several processes.
        self._is_interrupted |= number == signal.SIGINT
        self.signal_number = self.signal_number or number
