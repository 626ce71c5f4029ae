"""An HTTP server on this machine that sends files with ranges, and breaks connections where a test wants it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class FileServer:
    """How the server replies, and what it was asked."""

    body: bytes
    folder: str = "/files"
    url: str = ""
    files: dict[str, bytes] = field(default_factory=dict)  # by path; instead of the body
    cut_after_bytes: list[int] = field(default_factory=list)  # of the next responses
    knows_range: bool = True
    status: int = 200
    etag: str = '"version-1"'  # empty: the server sends none
    announces: bool = True  # the length of the body
    location: str = ""  # where it redirects to
    ignores_if_range: bool = False  # it sends a part of whatever version it has now
    asked: list[tuple[str, str | None]] = field(default_factory=list)  # path and range

    @property
    def ranges(self) -> list[str | None]:
        return [asked for _, asked in self.asked]


@contextmanager
def serve(server: FileServer) -> Iterator[FileServer]:
    """Serve until the block ends."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            asked = self.headers.get("Range")
            server.asked.append((self.path, asked))
            body = server.files.get(self.path.removeprefix(f"{server.folder}/")) if server.files else server.body
            if server.status != 200 or body is None or "absent" in self.path:
                self.send_error(server.status if server.status != 200 else 404)
                return
            if server.location:
                self.send_response(302)
                self.send_header("Location", server.location)
                self.end_headers()
                return
            is_same = server.ignores_if_range or self.headers.get("If-Range", server.etag) == server.etag
            is_part = asked is not None and server.knows_range and is_same
            start = int(asked.removeprefix("bytes=").rstrip("-")) if asked is not None and is_part else 0
            if start >= len(body):
                self.send_response(416)
                self.send_header("Content-Range", f"bytes */{len(body)}")
                if server.etag:
                    self.send_header("ETag", server.etag)
                self.end_headers()
                return
            rest = body[start:]
            self.send_response(206 if is_part else 200)
            if server.announces:
                self.send_header("Content-Length", str(len(rest)))
            if is_part:
                self.send_header("Content-Range", f"bytes {start}-{len(body) - 1}/{len(body)}")
            if server.etag:
                self.send_header("ETag", server.etag)
            self.end_headers()
            self.wfile.write(rest[: server.cut_after_bytes.pop(0) if server.cut_after_bytes else len(rest)])

        def do_HEAD(self) -> None:
            server.asked.append((self.path, None))
            self.send_error(404)

        def log_message(self, format: str, *arguments: object) -> None:
            """Quiet."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        server.url = f"http://127.0.0.1:{http.server_address[1]}{server.folder}"
        yield server
        http.shutdown()
        thread.join()
