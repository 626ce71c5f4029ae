"""A light HTTP load generator: one process, keep-alive connections, raw asyncio protocols.

Closed loop: each client sends its next request when the last one is answered. Open loop: requests arrive at random
times of a fixed rate (Poisson), whether or not earlier ones are answered; latency counts from the time of arrival, so
that a server that falls behind is not flattered.
"""

from __future__ import annotations

import asyncio
import json
import math
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, field
from typing import Any

_MAX_CONNECTIONS = 1024  # of the open loop
_START_TOGETHER_S = 0.3  # for the processes to receive their images
_MAX_LATE_S = 20.0  # an open loop ends when its requests take longer than this


@dataclass(frozen=True, slots=True)
class Target:
    """A server, and where in its JSON answer the best class is."""

    port: int
    label_keys: tuple[str | int, ...]
    path: str = "/predict"

    def request(self, image: bytes) -> bytes:
        """The bytes of a request with an image."""
        head = (
            f"POST {self.path} HTTP/1.1\r\nHost: 127.0.0.1:{self.port}\r\nContent-Type: image/jpeg\r\n"
            f"Content-Length: {len(image)}\r\n\r\n"
        )
        return head.encode() + image

    def label(self, body: bytes) -> int:
        """The best class of an answer."""
        found = json.loads(body)
        for key in self.label_keys:
            found = found[key]
        return int(found)


@dataclass(slots=True)
class LoadResult:
    """The measured window: latencies of good answers, failures, and the labels of each image."""

    window_s: float
    latencies_s: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    labels: dict[int, set[int]] = field(default_factory=dict)

    @property
    def per_s(self) -> float:
        return len(self.latencies_s) / self.window_s

    def add(self, other: LoadResult) -> None:
        """Count what another process found in the same window."""
        self.latencies_s += other.latencies_s
        self.errors += other.errors
        for image, labels in other.labels.items():
            self.labels.setdefault(image, set()).update(labels)


def percentile_s(latencies_s: Sequence[float], fraction: float) -> float:
    """The smallest latency that at least `fraction` of all requests do not exceed; infinite where there are none."""
    ordered = sorted(latencies_s)
    return ordered[max(0, math.ceil(fraction * len(ordered)) - 1)] if ordered else math.inf


class Connection(asyncio.Protocol):
    """A keep-alive connection with one request at a time."""

    def __init__(self) -> None:
        self._received = bytearray()
        self._answer: asyncio.Future[tuple[int, bytes]] | None = None
        self._transport: asyncio.Transport | None = None

    @classmethod
    async def open(cls, port: int) -> Connection:
        _, connection = await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port)
        return connection

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        end = self._received.find(b"\r\n\r\n")
        if end < 0:
            return
        head = bytes(self._received[:end]).lower()
        start = head.find(b"content-length:")
        length = int(head[start + 15 :].split(b"\r\n", 1)[0]) if start >= 0 else 0
        if len(self._received) < end + 4 + length:
            return
        body = bytes(self._received[end + 4 : end + 4 + length])
        self._received.clear()
        if self._answer is not None and not self._answer.done():
            self._answer.set_result((int(head.split(b" ", 2)[1]), body))

    def connection_lost(self, exc: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the server closed the connection"))

    async def send(self, request: bytes) -> tuple[int, bytes]:
        """The status and body of the answer."""
        assert self._transport is not None
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        return await self._answer

    def close(self) -> None:
        if self._transport is not None:
            self._transport.abort()


@dataclass(frozen=True, slots=True)
class Load:
    """The load on a server: `clients` for a closed loop, `rate_per_s` for an open one."""

    target: Target
    images: Sequence[bytes]
    warmup_s: float
    window_s: float
    clients: int = 0
    rate_per_s: float = 0.0
    seed: int = 0

    def part(self, number: int, num_parts: int) -> Load:
        """The share of one of several processes."""
        clients = len(range(number, self.clients, num_parts))
        seed = self.seed * num_parts + number
        return Load(self.target, self.images, self.warmup_s, self.window_s, clients, self.rate_per_s / num_parts, seed)


def run_load(load: Load, processes: int = 1, pool: Executor | None = None) -> LoadResult:
    """Send a load from this process, or its parts from several processes of a pool at the same time."""
    if processes == 1 or pool is None:
        return _run(load, time.time())
    start = time.time() + _START_TOGETHER_S
    parts = [load.part(number, processes) for number in range(processes)]
    results = list(pool.map(_run, parts, [start] * processes))
    for other in results[1:]:
        results[0].add(other)
    return results[0]


def _run(load: Load, start: float) -> LoadResult:
    """Send a load from a moment (of `time.time`) on."""
    time.sleep(max(0.0, start - time.time()))
    return asyncio.run(_closed_loop(load) if load.clients else _open_loop(load))


def _recorder(load: Load, start_s: float) -> tuple[LoadResult, Callable[[Connection, int, float], Awaitable[None]]]:
    """A function that sends an image and records the answer if its request belongs to the measured window."""
    result = LoadResult(load.window_s)
    requests = [load.target.request(image) for image in load.images]
    first_s, last_s = start_s + load.warmup_s, start_s + load.warmup_s + load.window_s

    async def send(connection: Connection, number: int, arrival_s: float) -> None:
        image = number % len(requests)
        status, body = await connection.send(requests[image])
        end_s = time.perf_counter()
        counted_s = end_s if load.clients else arrival_s  # a closed loop counts answers, an open one arrivals
        if not first_s <= counted_s < last_s:
            return
        if status != 200:
            result.errors.append(f"status {status}: {body[:200].decode('utf-8', 'replace')}")
            return
        try:
            result.labels.setdefault(image, set()).add(load.target.label(body))
        except (ValueError, KeyError, IndexError, TypeError):
            result.errors.append(f"no class in the answer {body[:200].decode('utf-8', 'replace')}")
            return
        result.latencies_s.append(end_s - arrival_s)

    return result, send


async def _closed_loop(load: Load) -> LoadResult:
    start_s = time.perf_counter()
    result, send = _recorder(load, start_s)
    end_s = start_s + load.warmup_s + load.window_s

    async def client(first: int) -> None:
        try:
            connection, number = await Connection.open(load.target.port), first
            while (now_s := time.perf_counter()) < end_s:
                await send(connection, number, now_s)
                number += load.clients
            connection.close()
        except OSError as error:
            result.errors.append(str(error))

    await asyncio.gather(*(client(number) for number in range(load.clients)))
    return result


async def _open_loop(load: Load) -> LoadResult:
    start_s = time.perf_counter()
    result, send = _recorder(load, start_s)
    end_s = start_s + load.warmup_s + load.window_s
    idle: list[Connection] = []
    tasks: set[asyncio.Task[None]] = set()
    draws, number, arrival_s = random.Random(load.seed), 0, start_s

    async def arrive(number: int, arrival_s: float) -> None:
        try:
            connection = idle.pop() if idle else await Connection.open(load.target.port)
            await send(connection, number, arrival_s)
            idle.append(connection)
        except OSError as error:
            result.errors.append(str(error))

    while (arrival_s := arrival_s + draws.expovariate(load.rate_per_s)) < end_s:
        await asyncio.sleep(max(0.0, arrival_s - time.perf_counter()))
        if len(tasks) >= _MAX_CONNECTIONS:
            result.errors.append("too many requests wait")
            break
        task = asyncio.create_task(arrive(number, arrival_s))
        tasks.add(task)
        task.add_done_callback(tasks.discard)
        number += 1
    if tasks:
        _, late = await asyncio.wait(tasks, timeout=_MAX_LATE_S)
        for task in late:
            result.errors.append(f"no answer within {_MAX_LATE_S:g} s")
            task.cancel()
    for connection in idle:
        connection.close()
    return result
