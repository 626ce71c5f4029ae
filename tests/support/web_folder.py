"""A web server for a folder with ranges and ETags that can fail on request."""

from __future__ import annotations

import hashlib
import os
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urlsplit


class WebFolder(ThreadingHTTPServer):
    """Serves the files below `folder`. `faults` are applied to the next GETs, one each: `503`, `403`, `cut` (the
    connection closes in the middle of the body), `truncated` (a shorter body than asked for, as if it were complete),
    `damaged` (a flipped bit) and `slow`."""

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.folder = folder
        self.faults: deque[str] = deque()
        self.is_down = False
        self.has_ranges = True
        self.requests: Counter[str] = Counter()  # by method and name

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def num_gets(self, ending: str = "") -> int:
        """How many GETs there were of files with this ending."""
        return sum(n for key, n in self.requests.items() if key.startswith("GET ") and key.endswith(ending))

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that has gone away is no error."""


class _Handler(BaseHTTPRequestHandler):
    server: WebFolder
    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer(with_body=False)

    def do_GET(self) -> None:
        self._answer(with_body=True)

    def _answer(self, with_body: bool) -> None:
        name = unquote(urlsplit(self.path).path).lstrip("/")
        self.server.requests[f"{self.command} {name}"] += 1
        fault = self.server.faults.popleft() if with_body and self.server.faults else ""
        file = self.server.folder / name
        if self.server.is_down or fault in ("503", "403"):
            self._refuse(403 if fault == "403" else 503)
        elif not file.is_file():
            self._refuse(404)
        else:
            if fault == "slow":
                time.sleep(0.3)
            self._send(file.read_bytes(), file, fault, with_body)

    def _send(self, content: bytes, file: Path, fault: str, with_body: bool) -> None:
        asked = re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("Range") or "")
        body, status = content, 200
        headers = {"ETag": f'"{hashlib.md5(content).hexdigest()}"'}
        if asked is not None and self.server.has_ranges:
            start, stop = int(asked[1]), min(int(asked[2]) + 1, len(content))
            body, status = content[start:stop], 206
            headers["Content-Range"] = f"bytes {start}-{stop - 1}/{len(content)}"
        if fault == "truncated":
            body = body[: len(body) // 2]
        if fault == "damaged":
            body = bytes([body[0] ^ 1]) + body[1:]
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        for key, value in headers.items():
            self.send_header(key, value)
        self.end_headers()
        if with_body:
            self.wfile.write(body[: len(body) // 2] if fault == "cut" else body)
            if fault == "cut":
                self.close_connection = True

    def _refuse(self, status: int) -> None:
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()


@contextmanager
def web_folder(folder: Path) -> Iterator[WebFolder]:
    """A server in threads of this process."""
    os.makedirs(folder, exist_ok=True)
    server = WebFolder(folder)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


if __name__ == "__main__":
    import sys

    with web_folder(Path(sys.argv[1])) as running:
        print(running.url, flush=True)
        threading.Event().wait()
