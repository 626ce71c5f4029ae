"""Fair sharing between clients: limits with a part for each of them, and the order in which their work is done.

Every image that was reserved in a queue is either submitted or released, also when its client goes away
(tests/serve/test_fairness.py).
"""

from __future__ import annotations

import asyncio
import itertools
import threading
from dataclasses import dataclass, field
from heapq import heappop, heappush
from typing import Generic, TypeVar

T = TypeVar("T")

_MAX_OVERRUN = 2  # times the limit, for clients that use less than their part when others have used it up


@dataclass(slots=True)
class Shares:
    """A limit on what all clients use together, in whatever unit.

    A client alone may use all of it. When it is used up, a client that has less than an equal part still gets that, so
    that nobody can shut the others out; then at most twice the limit is used. Not thread-safe.
    """

    limit: int
    used: int = field(default=0, init=False)
    _by_client: dict[str, int] = field(default_factory=dict, init=False)

    def has_room(self, client: str, amount: int = 1) -> bool:
        """True if a client may use so much more; anything fits where nothing is used."""
        if self.used == 0 or self.used + amount <= self.limit:
            return True
        num_clients = len(self._by_client) + (client not in self._by_client)
        part = max(1, self.limit // num_clients)
        return self._by_client.get(client, 0) + amount <= part and self.used + amount <= _MAX_OVERRUN * self.limit

    def take(self, client: str, amount: int = 1) -> None:
        self.used += amount
        self._by_client[client] = self._by_client.get(client, 0) + amount

    def give(self, client: str, amount: int = 1) -> None:
        self.used -= amount
        left = self._by_client.get(client, 0) - amount
        if left > 0:
            self._by_client[client] = left
        else:
            self._by_client.pop(client, None)


class FairClock:
    """Start-time fair queueing: work is done in the order of the times that `stamp` gives.

    A client's work begins when its work before has ended, in a time in which every client has a device of its own. So
    one that asks for little is not kept waiting by one that asks for much. Not thread-safe.
    """

    def __init__(self) -> None:
        self._now = 0.0
        self._ends: dict[str, float] = {}

    def stamp(self, client: str, cost: float) -> float:
        """The time at which work of this cost begins."""
        start = max(self._now, self._ends.get(client, 0.0))
        self._ends[client] = start + cost
        return start

    def charge(self, client: str, cost: float) -> None:
        """Add what work has cost beyond what `stamp` was told."""
        self._ends[client] = max(self._now, self._ends.get(client, 0.0)) + cost

    def advance(self, start: float) -> None:
        """Say that the work of this time begins now."""
        self._now = max(self._now, start)
        if len(self._ends) > 1000:
            self._ends = {client: end for client, end in self._ends.items() if end > self._now}


class FairQueue(Generic[T]):
    """Work of several clients in the order of a `FairClock`. Not thread-safe."""

    def __init__(self) -> None:
        self._clock = FairClock()
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self.charge = self._clock.charge

    def __len__(self) -> int:
        return len(self._heap)

    def push(self, client: str, cost: float, item: T) -> None:
        heappush(self._heap, (self._clock.stamp(client, cost), next(self._numbers), item))

    def pop(self) -> T:
        start, _, item = heappop(self._heap)
        self._clock.advance(start)
        return item


class FairTurns:
    """Begins one request in each round of an event loop, so that many of one client do not delay those of another."""

    def __init__(self) -> None:
        self._waiting: FairQueue[asyncio.Future[None]] = FairQueue()
        self._is_taken = False  # whether a request has begun in this round

    async def take(self, client: str) -> None:
        """Wait for a turn; there is none to wait for where the loop is idle."""
        loop = asyncio.get_running_loop()
        turn: asyncio.Future[None] = loop.create_future()
        self._waiting.push(client, 1.0, turn)
        if not self._is_taken:
            self._begin_next(loop)
        await turn

    def _begin_next(self, loop: asyncio.AbstractEventLoop) -> None:
        self._is_taken = False
        while self._waiting and not self._is_taken:
            turn = self._waiting.pop()
            if not turn.done():  # the request was canceled
                turn.set_result(None)
                self._is_taken = True
        if self._is_taken:
            loop.call_soon(self._begin_next, loop)


class ByteBudget:
    """Memory that threads may use together; those for which there is none wait."""

    def __init__(self, num_bytes: int) -> None:
        self._left = self._total = num_bytes
        self._changed = threading.Condition()

    def acquire(self, num_bytes: int) -> int:
        """Wait for so much, or for all if it is more than that; returns what to `release`."""
        num_bytes = min(num_bytes, self._total)
        with self._changed:
            self._changed.wait_for(lambda: self._left >= num_bytes)
            self._left -= num_bytes
        return num_bytes

    def release(self, num_bytes: int) -> None:
        with self._changed:
            self._left += num_bytes
            self._changed.notify_all()
