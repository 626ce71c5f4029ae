"""Writes checkpoints in a background thread while training continues."""

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
    work: Callable[[], T]
    on_done: Callable[[T, float], None]  # gets the result, and for how long it was waited for
    result: list[T] = field(default_factory=list)
    error: BaseException | None = None

    def run(self) -> None:
        try:
            self.result.append(self.work())
        except BaseException as error:  # raised by `wait`, in the thread that submitted the work
            self.error = error


class AsyncWriter:
    """Runs one write at a time in a thread; as a context manager it waits for the last one."""

    def __init__(self) -> None:
        self._write: _Write[object] | None = None
        self._thread: threading.Thread | None = None

    def submit(self, work: Callable[[], T], on_done: Callable[[T, float], None]) -> None:
        """Start the work once the previous one is done; `on_done` is called by the next `wait`."""
        self.wait()
        self._write = _Write(work, on_done)  # type: ignore[arg-type]
        # Not a daemon thread: a process that exits still finishes its checkpoint.
        self._thread = threading.Thread(target=self._write.run, name="reconv-checkpoint")
        self._thread.start()

    def wait(self, block: bool = True) -> None:
        """Wait for the write, call its `on_done` or raise its error; without `block` only if it has finished."""
        write, thread = self._write, self._thread
        if write is None or thread is None or (thread.is_alive() and not block):
            return
        began_s = time.perf_counter()
        thread.join()
        waited_s = time.perf_counter() - began_s
        self._write = self._thread = None
        if write.error is not None:
            raise write.error
        write.on_done(write.result[0], waited_s)

    def join(self, timeout_s: float) -> None:
        """Give the write some time to finish; may be called from any thread of a process that is about to exit."""
        thread = self._thread
        if thread is not None:
            thread.join(timeout_s)

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
