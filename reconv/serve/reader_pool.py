"""Threads that read images. Lighter than an executor, whose futures cost more than many requests have to spare."""

from __future__ import annotations

import asyncio
import ctypes
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeVar

from reconv.serve.fairness import FairQueue

T = TypeVar("T")
Task = tuple[str, Callable[..., None], tuple[Any, ...]]

_MIN_COST_S = 1e-3  # of a task; what it takes beyond that is charged when it has ended


class ReaderPool:
    """Runs functions in a fixed number of threads; clients take turns, each in the order of its tasks.

    With `is_background` its threads run at a lower priority, and give memory back to the system when they are done.
    """

    def __init__(self, num_threads: int, is_background: bool = False) -> None:
        self._queue: FairQueue[Task] = FairQueue()
        self._changed = threading.Condition()
        self._num_closed = 0  # threads that are to end
        self._is_background = is_background
        name = "reconv-read-large" if is_background else "reconv-read"
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{number}", daemon=True) for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, client: str, function: Callable[..., None], *args: Any) -> None:
        """Run a function, which must not raise."""
        with self._changed:
            self._queue.push(client, _MIN_COST_S, (client, function, args))
            self._changed.notify()

    async def call(self, client: str, function: Callable[..., T], *args: Any) -> T:
        """The result of a function that runs in one of the threads."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()

        def run() -> None:
            try:
                result = function(*args)
            except BaseException as error:  # of any kind: raised where the future is awaited
                call_in_loop(loop, _set, future, None, error)
            else:
                call_in_loop(loop, _set, future, result, None)

        self.submit(client, run)
        return await future

    def close(self) -> None:
        """End the threads after what they are doing."""
        with self._changed:
            self._num_closed = len(self._threads)
            self._changed.notify_all()

    def _work(self) -> None:
        if self._is_background:
            _lower_priority()
        while (task := self._next()) is not None:
            client, function, args = task
            began_s = time.perf_counter()
            function(*args)
            del task, function, args  # not kept in memory while waiting
            with self._changed:
                self._queue.charge(client, max(0.0, time.perf_counter() - began_s - _MIN_COST_S))
                is_idle = not self._queue
            if self._is_background and is_idle:
                give_memory_back()

    def _next(self) -> Task | None:
        with self._changed:
            while not self._queue:
                if self._num_closed:
                    return None
                self._changed.wait()
            return self._queue.pop()


def _lower_priority() -> None:
    """Let the other threads of this process go first; Linux has a priority for each thread."""
    if sys.platform == "linux":
        with suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), 10)


def give_memory_back() -> None:
    """Return what glibc keeps of freed memory; it would otherwise stay as large as the largest requests at once."""
    if sys.platform == "linux":
        with suppress(OSError, AttributeError):
            ctypes.CDLL(None).malloc_trim(0)


def call_in_loop(loop: asyncio.AbstractEventLoop, function: Callable[..., None], *args: Any) -> None:
    """Call a function in the event loop, which may have ended."""
    with suppress(RuntimeError):
        loop.call_soon_threadsafe(function, *args)


def _set(future: asyncio.Future[Any], result: Any, error: BaseException | None) -> None:
    if future.done():  # the request was canceled
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)
