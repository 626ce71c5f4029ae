"""A checkpoint written beside the steps that follow it.

Owns the one thread that writes, and what becomes of its end. Refuses to know what is written and who is told.
Invariant: at most one write is under way; how it ended is heard by the thread that began it, once, and before the next.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Generic, TypeVar

T = TypeVar("T")


@dataclass(slots=True)
class _Write(Generic[T]):
    """A write and how it ended."""

    work: Callable[[], T]
    heard: Callable[[T, float], None]  # what came of it, and for how long it was waited for
    result: list[T] = field(default_factory=list)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self.work())
        except BaseException as error:  # told to the thread that began it
            self.error = error


class AsyncWriter:
    """Does one piece of work at a time in a thread; as a context manager it waits for the last one."""

    def __init__(self) -> None:
        self._write: _Write[object] | None = None
        self._thread: threading.Thread | None = None

    def begin(self, work: Callable[[], T], heard: Callable[[T, float], None]) -> None:
        """Do the work beside the caller, after the work before it; `heard` is called in a later `settle`."""
        self.settle()
        self._write = _Write(work, heard)  # type: ignore[arg-type]
        # Not a daemon: a process that ends otherwise still finishes its checkpoint.
        self._thread = threading.Thread(target=self._write.run, name="reconv-checkpoint")
        self._thread.start()

    def settle(self, wait: bool = True) -> None:
        """Hear how the write ended, and raise what it failed with; one that has not ended is waited for, or left."""
        write, thread = self._write, self._thread
        if write is None or thread is None or (thread.is_alive() and not wait):
            return
        began_s = time.perf_counter()
        thread.join()
        waited_s = time.perf_counter() - began_s
        self._write = self._thread = None
        if write.error is not None:
            raise write.error
        write.heard(write.result[0], waited_s)

    def linger(self, limit_s: float) -> None:
        """Give the write some time to end, from any thread of a process that is about to end."""
        thread = self._thread
        if thread is not None:
            thread.join(limit_s)

    def __enter__(self) -> AsyncWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.settle()
        except Exception as failed:
            if error is None:
                raise
            error.add_note(f"the last checkpoint could not be written: {failed}")
