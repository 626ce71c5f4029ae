"""Writes checkpoints in a background thread while training continues.

A save copies the state. One thread writes it: files, then the manifest, fsync, rename; then `best.json`, then
retention (tests/faults/test_interrupted_saves.py).
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Write(Generic[T]):
    step: int
    work: Callable[[], T]
    on_done: Callable[[T, float, tuple[int, ...]], None]
    replaced: tuple[int, ...]  # the steps of earlier writes that this one stands for
    blocked_s: float  # how long the submitting thread has waited for this write
    result: list[T] = field(default_factory=list)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self.work())
        except BaseException as error:  # raised by `wait`, in the thread that submitted the work
            self.error = error


class AsyncWriter:
    """Runs one write at a time in a thread, with at most one more in the queue; as a context manager it waits for both.

    A write that is submitted while another one is in the queue replaces it: of two states to be saved, the newer one is
    enough. So `submit` blocks only if the one in the queue is needed as well.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._running: _Write[object] | None = None
        self._queued: _Write[object] | None = None
        self._finished: deque[_Write[object]] = deque()
        self._thread: threading.Thread | None = None

    @property
    def is_busy(self) -> bool:
        """True if a write is running."""
        return self._running is not None

    def submit(
        self,
        step: int,
        work: Callable[[], T],
        on_done: Callable[[T, float, tuple[int, ...]], None],
        is_needed: Callable[[int], bool],
    ) -> None:
        """Do the work for a step, now or after the write that is running.

        `is_needed` says whether the write of a step may not be replaced by this one. `on_done` is called by a later
        `wait` or `submit`: with the result, the time for which this thread was blocked, and the steps whose writes were
        replaced.
        """
        self.wait(block=False)
        began_s = time.perf_counter()
        with self._changed:
            while self._queued is not None and is_needed(self._queued.step):
                self._changed.wait()
            replaced = () if self._queued is None else (*self._queued.replaced, self._queued.step)
            write = _Write(step, work, on_done, replaced, time.perf_counter() - began_s)
            self._queued = write  # type: ignore[assignment]
            must_start = self._running is None
            if must_start:
                self._take_next()
        if must_start:
            # Not a daemon thread: a process that exits still finishes its checkpoint.
            self._thread = threading.Thread(target=self._run, name="reconv-checkpoint")
            self._thread.start()

    def wait(self, block: bool = True) -> None:
        """Call `on_done` of writes that have finished, or raise their error; with `block` wait for all of them."""
        began_s = time.perf_counter()
        with self._changed:
            while block and self._running is not None:
                self._changed.wait()
        waited_s = time.perf_counter() - began_s
        while self._finished:
            write = self._finished.popleft()
            if write.error is not None:
                raise write.error
            is_last = not self._finished
            write.on_done(write.result[0], write.blocked_s + (waited_s if is_last else 0.0), write.replaced)

    def join(self, timeout_s: float) -> None:
        """Give the writes some time to finish; may be called from any thread of a process that is about to exit."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

    def _run(self) -> None:
        while (write := self._running) is not None:
            write.run()
            with self._changed:
                self._finished.append(write)
                self._take_next()

    def _take_next(self) -> None:
        """Make the write in the queue the running one; called with the lock."""
        self._running, self._queued = self._queued, None
        self._changed.notify_all()

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.wait()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the last checkpoint could not be written: {failed}")
