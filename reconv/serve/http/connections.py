"""HTTP connections that do not wait forever: uvicorn's, with limits on their number and on slow clients.

Requests are parsed by httptools where it is installed, which is several times faster than h11.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

from reconv.serve.fairness import Shares
from reconv.serve.http.access import peer_client
from reconv.serve.limits import Limits

try:
    from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol as HttpProtocol
except ModuleNotFoundError:
    from uvicorn.protocols.http.h11_impl import H11Protocol as HttpProtocol  # type: ignore[assignment]

_MAX_HEADER_BYTES = 64 << 10
_CLOSE_S = 5.0  # to take the rest of a response, before the connection is cut


def limited_protocol(limits: Limits, on_count: Callable[[int], None] = lambda num_open: None) -> type[asyncio.Protocol]:
    """The class of connections with these limits; `on_count` is called when their number has changed."""

    open_connections = Shares(limits.max_connections)

    class LimitedConnection(HttpProtocol):
        """A connection whose request must arrive in time, and which is closed for good."""

        _timer: asyncio.TimerHandle | None = None
        _client: str | None = None  # whose connection it counts as; None: it was refused
        _header_bytes = 0  # that have arrived of a request which has not begun

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            on_count(len(self.connections))
            peer = transport.get_extra_info("peername")
            client = peer_client(str(peer[0]) if peer else "")
            if open_connections.has_room(client):
                open_connections.take(client)
                self._client = client
                self._await_request()
            else:
                transport.write(_TOO_MANY)
                self._close()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            if self._client is not None:
                open_connections.give(self._client)
            super().connection_lost(exc)
            on_count(len(self.connections))

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            if self.transport.is_closing():
                self._cut_later()
            elif self.cycle is not None and not self.cycle.response_complete:
                self._header_bytes = 0
                self._stop_timer()
            else:
                self._header_bytes += len(data)
                if self._header_bytes > _MAX_HEADER_BYTES:
                    self._close()
                elif self._timer is None:
                    self._await_request()

        def timeout_keep_alive_handler(self) -> None:
            super().timeout_keep_alive_handler()
            self._cut_later()

        def on_response_complete(self) -> None:
            super().on_response_complete()
            if self.transport.is_closing():
                self._cut_later()

        def shutdown(self) -> None:
            super().shutdown()
            if self.transport.is_closing():
                self._cut_later()

        def _await_request(self) -> None:
            self._timer = self.loop.call_later(limits.header_timeout_s, self._close)

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _close(self) -> None:
            self.transport.close()
            self._cut_later()

        def _cut_later(self) -> None:
            """A client that does not read keeps a closed connection open, so that it is cut."""
            self._stop_timer()
            self._timer = self.loop.call_later(_CLOSE_S, self.transport.abort)

    return LimitedConnection


def _raw_response(status: str, code: str, message: str) -> bytes:
    body = json.dumps({"error": {"code": code, "message": message}}).encode()
    head = f"HTTP/1.1 {status}\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
    return head.encode() + b"Retry-After: 1\r\nConnection: close\r\n\r\n" + body


_TOO_MANY = _raw_response("503 Service Unavailable", "overloaded", "the server has too many connections")
