"""A server in a process of its own, and the requests that tests send to it."""

from __future__ import annotations

import base64
import http.client
import json
import os
import re
import signal
import struct
import subprocess
import sys
import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

START_S = 60


@dataclass(frozen=True, slots=True)
class Answer:
    """What a server answered."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return json.loads(self.body)


class ServerProcess:
    """`reconv serve` with these arguments on a free port, ready unless told otherwise; it is stopped at the end."""

    def __init__(self, log: Path, *args: str | Path, wait_until_ready: bool = True) -> None:
        self.log_file = log
        command = [sys.executable, "-m", "reconv", "serve", *map(str, args), "--port", "0"]
        environ = {**os.environ, "TRITON_INTERPRET": "0"}
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                command, stdout=output, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environ
            )
        found = self.wait_for_log(r"listening on http://(\S+):(\d+)")
        self.host, self.port = found[1], int(found[2])
        if wait_until_ready:
            self.wait_until_ready()

    @property
    def log(self) -> str:
        return self.log_file.read_text()

    def wait_for_log(self, pattern: str) -> re.Match[str]:
        """Wait until the log has a line like this."""
        deadline = time.monotonic() + START_S
        while (found := re.search(pattern, self.log)) is None:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"no {pattern!r} in the log of a server (exit {self.process.poll()}):\n{self.log}")
            time.sleep(0.02)
        return found

    def wait_until_ready(self) -> None:
        deadline = time.monotonic() + START_S
        while self.request("GET", "/v2/health/ready").status != 200:
            assert time.monotonic() < deadline, self.log
            time.sleep(0.02)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(self.host, self.port, timeout=30)

    def request(
        self,
        method: str,
        path: str,
        body: bytes | None = None,
        content_type: str = "image/png",
        headers: Mapping[str, str] | None = None,
    ) -> Answer:
        """Send a request on a connection of its own."""
        connection = self.connect()
        try:
            return ask(connection, method, path, body, content_type, headers)
        finally:
            connection.close()

    def predict(self, image: bytes, query: str = "", content_type: str = "image/png") -> Answer:
        return self.request("POST", f"/predict{query}", image, content_type)

    def terminate(self) -> None:
        self.process.send_signal(signal.SIGTERM)

    def wait(self) -> int:
        return self.process.wait(START_S)

    def memory_kib(self) -> int:
        """Resident memory."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        found = re.search(r"VmRSS:\s+(\d+)", status)
        assert found is not None
        return int(found[1])

    def num_files(self) -> int:
        return len(os.listdir(f"/proc/{self.process.pid}/fd"))

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.process.kill()
        self.process.wait()


def ask(
    connection: http.client.HTTPConnection,
    method: str,
    path: str,
    body: bytes | None = None,
    content_type: str = "image/png",
    headers: Mapping[str, str] | None = None,
) -> Answer:
    """Send a request on an open connection."""
    sent = {**({} if body is None else {"Content-Type": content_type}), **(headers or {})}
    connection.request(method, path, body, sent)
    response = connection.getresponse()
    return Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, response.read())


def json_images(images: Sequence[bytes]) -> bytes:
    """The JSON body of several images."""
    return json.dumps({"images": [base64.b64encode(image).decode() for image in images]}).encode()


def multipart(images: Sequence[bytes], names: Sequence[str] = ()) -> tuple[bytes, str]:
    """A multipart body of several files, and its content type."""
    boundary = "----a-boundary-of-a-test"
    parts = []
    for number, image in enumerate(images):
        name = names[number] if names else f"image{number}.png"
        head = f'Content-Disposition: form-data; name="image{number}"; filename="{name}"\r\nContent-Type: image/png'
        parts.append(f"--{boundary}\r\n{head}\r\n\r\n".encode() + image + b"\r\n")
    return b"".join(parts) + f"--{boundary}--\r\n".encode(), f"multipart/form-data; boundary={boundary}"


def pixel_bomb(width: int = 60_000, height: int = 60_000) -> bytes:
    """A small PNG file that says it has so many pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")
