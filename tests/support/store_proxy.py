"""A proxy in front of an HTTP server that adds latency and faults: 503, slow answers, cut and truncated bodies.

    python tests/support/store_proxy.py http://127.0.0.1:18080 --port 18090 --delay-ms 100 --faults 503=0.05,cut=0.05

Each fault has its probability per request; which request gets which is a function of its number and `--seed`.
"""

from __future__ import annotations

import argparse
import hashlib
import re
import socket
import socketserver
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from urllib.parse import urlsplit

_CHUNK_BYTES = 1 << 20
_MAX_HEAD_BYTES = 1 << 16
FAULTS = ("503", "slow", "cut", "truncated")


@dataclass
class ProxyRules:
    """What the proxy does to requests; may be changed while it runs."""

    upstream: str
    delay_s: float = 0.0  # before a connection is accepted and before each request is passed on: a round trip each
    faults: Mapping[str, float] = field(default_factory=dict)
    seed: int = 0
    is_down: bool = False  # every request gets a 503
    refusal: tuple[int, bytes] | None = None  # status and body that every request gets
    counts: Counter[str] = field(default_factory=Counter)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def next_fault(self) -> str:
        """The fault of the next request; empty for none."""
        with self.lock:
            self.counts["requests"] += 1
            number = self.counts["requests"]
            digest = hashlib.blake2b(f"{self.seed}/{number}".encode(), digest_size=8).digest()
            draw = int.from_bytes(digest, "big") / 2**64
            fault = "503" if self.is_down else ""
            for name, probability in self.faults.items() if not fault else ():
                if draw < probability:
                    fault = name
                    break
                draw -= probability
            self.counts[fault or "passed"] += 1
        return fault


class _Proxy(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 256

    def __init__(self, rules: ProxyRules, port: int) -> None:
        super().__init__(("127.0.0.1", port), _Handler)
        self.rules = rules

    def handle_error(self, request: object, client_address: object) -> None:
        """Connections that break are the purpose of this program."""


class _Handler(socketserver.BaseRequestHandler):
    server: _Proxy

    def handle(self) -> None:
        rules, client = self.server.rules, self.request
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        address = urlsplit(rules.upstream)
        time.sleep(rules.delay_s)
        with socket.create_connection((address.hostname or "", address.port or 80)) as upstream:
            upstream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            rest = b""
            while True:
                head, rest = _read_head(client, rest)
                if not head or not self._exchange(client, upstream, head, rest, rules):
                    return
                rest = b""

    def _exchange(
        self, client: socket.socket, upstream: socket.socket, head: bytes, rest: bytes, rules: ProxyRules
    ) -> bool:
        """Pass on one request and its answer; False to close the connection."""
        fault = rules.next_fault()
        time.sleep(rules.delay_s)
        if b"expect: 100-continue" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
            head = re.sub(rb"(?i)expect: 100-continue\r\n", b"", head)
        length = _content_length(head)
        body = rest + _read_exactly(client, length - len(rest))
        if fault == "503":
            client.sendall(b"HTTP/1.1 503 Slow Down\r\nContent-Length: 0\r\n\r\n")
            return True
        if rules.refusal is not None:
            status, text = rules.refusal
            client.sendall(b"HTTP/1.1 %d Refused\r\nContent-Length: %d\r\n\r\n" % (status, len(text)) + text)
            return True
        upstream.sendall(head + body)
        answer, rest = _read_head(upstream, b"")
        while answer.startswith(b"HTTP/1.1 100"):
            answer, rest = _read_head(upstream, rest)
        if not answer:  # the server has closed a connection that was not used for a while
            return False
        if b"\r\ntransfer-encoding: chunked" in answer.lower():
            while not rest.endswith(b"0\r\n\r\n"):
                rest += upstream.recv(_CHUNK_BYTES)
            client.sendall(answer + (rest[: len(rest) // 2] if fault in ("cut", "truncated") else rest))
            return fault not in ("cut", "truncated")
        length = 0 if head.startswith(b"HEAD ") else _content_length(answer)
        if fault == "slow":
            time.sleep(2.0)
        if fault in ("cut", "truncated") and length > 1:
            if fault == "truncated":
                answer = re.sub(rb"(?i)content-length: *\d+", b"Content-Length: %d" % (length // 2), answer)
            client.sendall(answer + (rest + _read_exactly(upstream, length - len(rest)))[: length // 2])
            return False
        client.sendall(answer + rest)
        left = length - len(rest)
        while left > 0:
            chunk = upstream.recv(min(_CHUNK_BYTES, left))
            if not chunk:
                return False
            client.sendall(chunk)
            left -= len(chunk)
        return b"connection: close" not in answer.lower()


def _read_head(source: socket.socket, rest: bytes) -> tuple[bytes, bytes]:
    """The head of a message and what came after it; an empty head at the end."""
    while b"\r\n\r\n" not in rest:
        chunk = source.recv(_MAX_HEAD_BYTES)
        if not chunk:
            return b"", b""
        rest += chunk
    head, _, after = rest.partition(b"\r\n\r\n")
    return head + b"\r\n\r\n", after


def _content_length(head: bytes) -> int:
    match = re.search(rb"(?i)\r\ncontent-length: *(\d+)", head)
    return int(match[1]) if match else 0


def _read_exactly(source: socket.socket, length: int) -> bytes:
    parts = []
    while length > 0:
        chunk = source.recv(min(_CHUNK_BYTES, length))
        if not chunk:
            raise ConnectionError("ended early")
        parts.append(chunk)
        length -= len(chunk)
    return b"".join(parts)


@contextmanager
def store_proxy(rules: ProxyRules, port: int = 0) -> Iterator[str]:
    """The address of a proxy that runs in threads of this process."""
    with _Proxy(rules, port) as proxy:
        thread = threading.Thread(target=proxy.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        thread.start()
        try:
            yield f"http://127.0.0.1:{proxy.server_address[1]}"
        finally:
            proxy.shutdown()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("upstream")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--delay-ms", type=float, default=0.0)
    parser.add_argument("--faults", default="", help=f"as in 503=0.05,cut=0.01; of {', '.join(FAULTS)}")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    pairs = [part.split("=") for part in args.faults.split(",") if part]
    rules = ProxyRules(args.upstream, args.delay_ms / 1000, {name: float(value) for name, value in pairs}, args.seed)
    with store_proxy(rules, args.port) as url:
        print(url, flush=True)
        threading.Event().wait()


if __name__ == "__main__":
    main()
