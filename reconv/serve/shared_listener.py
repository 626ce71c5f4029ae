"""Accepts connections from a socket that several processes share, so that each gets about as many.

Whoever is awake first would otherwise take most of a burst of connections, and clients keep them.
"""

from __future__ import annotations

import asyncio
import mmap
import socket
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

_FILE = "connections"
_ABSENT = 1 << 62  # the count of a process that does not accept connections
_YIELD_S = 0.002  # to a process that has fewer connections; if it is busy or stopped, another one takes them after all
_RETRY_S = 1.0  # without a free file descriptor


class ConnectionCounts:
    """The number of open connections of each process, in shared memory."""

    def __init__(self, folder: Path, num_processes: int) -> None:
        file = folder / _FILE
        if not file.exists():  # the parent creates it
            file.write_bytes(_ABSENT.to_bytes(8, "little") * num_processes)
        with file.open("r+b") as opened:
            self._counts = memoryview(mmap.mmap(opened.fileno(), 0)).cast("q")

    def set(self, process: int, count: int) -> None:
        self._counts[process] = count

    def set_absent(self, process: int) -> None:
        """Say that a process accepts no connections."""
        self._counts[process] = _ABSENT

    def is_fewest(self, process: int) -> bool:
        """True if no other process has fewer connections."""
        return self._counts[process] <= min(self._counts)


class SharedListener:
    """A listening socket in one of the processes. It is closed like asyncio's servers."""

    def __init__(self, listener: socket.socket, counts: ConnectionCounts, process: int) -> None:
        self._listener, self._counts, self._process = listener, counts, process
        self._num_open = self._num_opening = 0
        self._tasks: set[asyncio.Task[object]] = set()
        self._is_closed = False

    def on_count(self, num_open: int) -> None:
        """Called with the number of open connections whenever it has changed."""
        self._num_open = num_open
        self._publish()

    def start(self, make_protocol: Callable[[], asyncio.Protocol]) -> None:
        """Accept connections in the running event loop."""
        self._loop, self._make_protocol = asyncio.get_running_loop(), make_protocol
        self._listener.setblocking(False)
        self._publish()
        self._loop.add_reader(self._listener.fileno(), self._on_connection)

    def close(self) -> None:
        """Accept no more connections."""
        if not self._is_closed:
            self._is_closed = True
            self._counts.set_absent(self._process)
            self._loop.remove_reader(self._listener.fileno())
            self._listener.close()

    async def wait_closed(self) -> None:
        """`close` does all."""

    def _publish(self) -> None:
        if not self._is_closed:
            self._counts.set(self._process, self._num_open + self._num_opening)

    def _on_connection(self) -> None:
        if self._counts.is_fewest(self._process):
            self._accept()
        else:
            self._pause(_YIELD_S)

    def _pause(self, seconds: float) -> None:
        self._loop.remove_reader(self._listener.fileno())
        self._loop.call_later(seconds, self._resume)

    def _resume(self) -> None:
        if not self._is_closed:
            self._loop.add_reader(self._listener.fileno(), self._on_connection)
            self._accept()

    def _accept(self) -> None:
        try:
            accepted, _ = self._listener.accept()
        except (BlockingIOError, InterruptedError, ConnectionAbortedError):
            return  # another process has it, or the client has gone
        except OSError:
            self._pause(_RETRY_S)
            return
        accepted.setblocking(False)
        self._num_opening += 1
        self._publish()
        task = self._loop.create_task(self._open(accepted))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _open(self, accepted: socket.socket) -> None:
        try:
            with suppress(OSError):  # the client has gone
                accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                await self._loop.connect_accepted_socket(self._make_protocol, accepted)
        finally:
            self._num_opening -= 1
            self._publish()
