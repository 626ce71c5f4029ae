"""Threads that read images. Lighter than an executor, whose futures cost more than many requests have to spare."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, TypeVar

T = TypeVar("T")


class ReaderPool:
    """Runs functions in a fixed number of threads, in the order they came."""

    def __init__(self, num_threads: int) -> None:
        self._tasks: SimpleQueue[tuple[Callable[..., None], tuple[Any, ...]] | None] = SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"reconv-read-{number}", daemon=True)
            for number in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, function: Callable[..., None], *args: Any) -> None:
        """Run a function, which must not raise."""
        self._tasks.put((function, args))

    async def call(self, function: Callable[..., T], *args: Any) -> T:
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

        self.submit(run)
        return await future

    def close(self) -> None:
        """End the threads after what they are doing."""
        for _ in self._threads:
            self._tasks.put(None)

    def _work(self) -> None:
        while (task := self._tasks.get()) is not None:
            function, args = task
            function(*args)
            del task, function, args  # not kept in memory while waiting


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
