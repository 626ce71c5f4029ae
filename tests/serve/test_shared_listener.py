"""A listening socket that several processes share, here several times in one event loop."""

from __future__ import annotations

import asyncio
from pathlib import Path

from reconv.serve.server import open_port
from reconv.serve.shared_listener import ConnectionCounts, SharedListener


class Connections:
    """The connections that one listener has accepted."""

    def __init__(self, listener: SharedListener, num_before: int) -> None:
        self.listener, self.num_before, self.transports = listener, num_before, list[asyncio.BaseTransport]()
        listener.on_count(num_before)

    def make(self) -> asyncio.Protocol:
        connections = self

        class Connection(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                connections.transports.append(transport)
                connections.listener.on_count(connections.num_before + len(connections.transports))

        return Connection()


async def accept(folder: Path, num_clients: int, num_before: int = 0, has_stuck: bool = False) -> list[int]:
    """How many connections each of two listeners gets if the first has some, and a third process accepts none."""
    counts = ConnectionCounts(folder, 3)
    if has_stuck:
        counts.set(2, 0)
    with open_port("127.0.0.1", 0) as port:
        listeners = [SharedListener(port.dup(), counts, process) for process in range(2)]
        accepted = [Connections(listeners[0], num_before), Connections(listeners[1], 0)]
        for listener, connections in zip(listeners, accepted, strict=True):
            listener.start(connections.make)
        address = port.getsockname()
        clients = await asyncio.gather(*(asyncio.open_connection(*address) for _ in range(num_clients)))
        async with asyncio.timeout(30):
            while sum(len(connections.transports) for connections in accepted) < num_clients:
                await asyncio.sleep(0.01)
        for listener in listeners:
            listener.close()
        for _, writer in clients:
            writer.close()
        for connections in accepted:
            for transport in connections.transports:
                transport.close()
    return [len(connections.transports) for connections in accepted]


def test_connections_go_to_the_process_that_has_fewer(tmp_path: Path) -> None:
    first, second = asyncio.run(accept(tmp_path, 20, num_before=20))
    assert first + second == 20 and second >= 14


def test_connections_do_not_wait_for_a_process_that_is_stuck(tmp_path: Path) -> None:
    assert sum(asyncio.run(accept(tmp_path, 20, has_stuck=True))) == 20
