"""Soak of `reconv serve`: good requests mixed with broken ones, for minutes; every answer is checked.

    python -m benchmarks.serve.soak RUN --minutes 10

RUN is a trained classifier. The server runs in a process of its own, with a token. Clients send images and compare each
answer with that of `Predictor`. Beside them, others send truncated files, pixel bombs, wrong types, large bodies and
what is not HTTP, are slow, go away, or have the wrong token. The table has what was sent and what came back; at the end
the server must have answered every good request rightly, and have no more memory, threads or files than after the first
quarter. Exit code 1: something was wrong.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import os
import random
import re
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from reconv.api import Predictor

TOKEN = "soak-token"
TOLERANCE = 1e-5  # of a score; batches of other sizes may move the last bits
MAX_GROWTH_MIB = 48.0
LIMITS = ("--max-body-mb", "4", "--timeout-s", "3", "--max-connections", "128", "--max-queue", "64")


def image_file(seed: int, side: int = 96, kind: str = "JPEG") -> bytes:
    """A random image."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side + seed, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind)
    return file.getvalue()


def pixel_bomb(side: int = 60_000) -> bytes:
    """A small PNG file that says it has side x side pixels."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", side, side, 8, 2, 0, 0, 0)
    pixels = zlib.compress(bytes(1 << 20))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


@dataclass
class Soak:
    """The server, what is sent to it, and what came back."""

    port: int
    images: list[bytes]
    expected: list[dict[str, float]]
    stop: threading.Event = field(default_factory=threading.Event)
    results: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)
    latencies_s: list[float] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def record(self, kind: str, outcome: str, is_right: bool) -> None:
        with self.lock:
            self.results.setdefault(kind, Counter())[outcome if is_right else f"WRONG {outcome}"] += 1
            if not is_right:
                self.wrong.append(f"{kind}: {outcome}")

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)

    def open_socket(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=60)

    def head(self, length: int, token: str = TOKEN) -> bytes:
        return (
            f"POST /predict HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n"
            f"Content-Type: image/jpeg\r\nContent-Length: {length}\r\n\r\n"
        ).encode()

    def send(self, body: bytes, content_type: str = "image/jpeg", token: str = TOKEN, query: str = "") -> int:
        """The status of the answer to one request on a connection of its own; 0: the connection was cut."""
        connection = self.connect()
        headers = {"Content-Type": content_type, "Authorization": f"Bearer {token}"}
        try:
            connection.request("POST", f"/predict{query}", body, headers)
            response = connection.getresponse()
            response.read()
            return response.status
        except (ConnectionError, http.client.HTTPException):
            return 0
        finally:
            connection.close()

    def good_client(self, seed: int) -> None:
        """Send images on one connection, and check each answer."""
        connection, choose = self.connect(), random.Random(seed)
        headers = {"Content-Type": "image/jpeg", "Authorization": f"Bearer {TOKEN}"}
        while not self.stop.is_set():
            number = choose.randrange(len(self.images))
            began_s = time.perf_counter()
            try:
                connection.request("POST", "/predict?top=1000", self.images[number], headers)
                response = connection.getresponse()
                status, body = response.status, response.read()
            except (OSError, http.client.HTTPException) as error:
                self.record("good", type(error).__name__, is_right=False)
                connection.close()
                continue
            if status == 503 and response.getheader("Retry-After"):
                self.record("good", "503", is_right=True)  # the limits are small, and it is told when to come back
                time.sleep(0.1)
                continue
            is_right = status == 200 and self.is_expected(number, json.loads(body))
            self.record("good", str(status), is_right)
            self.latencies_s.append(time.perf_counter() - began_s)
        connection.close()

    def is_expected(self, number: int, answer: dict[str, Any]) -> bool:
        found = {item["name"]: item["score"] for item in answer["predictions"][0]["classes"]}
        expected = self.expected[number]
        return found.keys() == expected.keys() and all(
            abs(found[name] - score) < TOLERANCE for name, score in expected.items()
        )

    def bad_client(self, seed: int) -> None:
        """Do something wrong, then something else, until the end."""
        choose = random.Random(seed)
        while not self.stop.is_set():
            kind = choose.choice(list(BAD))
            try:
                outcome, is_right = BAD[kind](self, choose)
            except OSError as error:
                outcome, is_right = type(error).__name__, isinstance(error, ConnectionError)
            self.record(kind, outcome, is_right)
            self.stop.wait(choose.uniform(0, 0.1))


Outcome = tuple[str, bool]


def expect(soak: Soak, status: int, body: bytes, *allowed: int, **options: str) -> Outcome:
    found = soak.send(body, **options)
    return str(found), found in (status, 503, *allowed)


def truncated(soak: Soak, choose: random.Random) -> Outcome:
    image = choose.choice(soak.images)
    return expect(soak, 400, image[: len(image) // 2])


def wrong_type(soak: Soak, choose: random.Random) -> Outcome:
    kind = choose.choice(["text/html", "video/mp4", "application/x-www-form-urlencoded"])
    return expect(soak, 415, soak.images[0], content_type=kind)


def bad_json(soak: Soak, choose: random.Random) -> Outcome:
    body = choose.choice([b"{", b"[" * 50_000, b'{"image": "/etc/passwd"}', b'{"images": 3}', b"\xff\xfe"])
    return expect(soak, 400, body, content_type="application/json")


def not_an_image(soak: Soak, choose: random.Random) -> Outcome:
    return expect(soak, 400, choose.randbytes(choose.randrange(1, 100_000)))


def large_body(soak: Soak, choose: random.Random) -> Outcome:
    return expect(soak, 413, bytes(choose.choice([5_000_000, 40_000_000])), 0)


def wrong_token(soak: Soak, choose: random.Random) -> Outcome:
    return expect(soak, 401, soak.images[0], token=choose.choice(["", "wrong", TOKEN + "x"]))


def until_closed(connection: socket.socket) -> bytes:
    received = b""
    try:
        while data := connection.recv(65536):
            received += data
    except ConnectionError:
        pass
    return received


def slow_header(soak: Soak, choose: random.Random) -> Outcome:
    with soak.open_socket() as connection:
        connection.sendall(soak.head(100)[:40])
        received = until_closed(connection)
    return "cut" if received == b"" else received[9:12].decode(), received == b"" or received[9:12] == b"503"


def slow_body(soak: Soak, choose: random.Random) -> Outcome:
    with soak.open_socket() as connection:
        connection.sendall(soak.head(1000) + b"abc")
        status = until_closed(connection)[9:12].decode()
    return status or "cut", status in ("408", "503", "")


def gone_in_body(soak: Soak, choose: random.Random) -> Outcome:
    with soak.open_socket() as connection:
        connection.sendall(soak.head(len(soak.images[0])) + soak.images[0][:500])
    return "closed", True


def gone_before_answer(soak: Soak, choose: random.Random) -> Outcome:
    with soak.open_socket() as connection:
        connection.sendall(soak.head(len(soak.images[0])) + soak.images[0])
        if choose.random() < 0.5:  # a reset instead of an end
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    return "closed", True


def garbage(soak: Soak, choose: random.Random) -> Outcome:
    with soak.open_socket() as connection:
        connection.sendall(choose.choice([b"\x16\x03\x01\x02", b"GET\r\n\r\n", choose.randbytes(20_000)]))
        status = until_closed(connection)[9:12].decode("latin-1")
    return status or "cut", status in ("400", "503", "")


BAD: dict[str, Callable[[Soak, random.Random], Outcome]] = {
    "truncated JPEG": truncated,
    "pixel bomb": lambda soak, choose: expect(soak, 400, pixel_bomb(), content_type="image/png"),
    "not an image": not_an_image,
    "wrong content type": wrong_type,
    "bad JSON": bad_json,
    "large body": large_body,
    "wrong token": wrong_token,
    "unknown model": lambda soak, choose: expect(soak, 404, soak.images[0], query="?model=other"),
    "slow header": slow_header,
    "slow body": slow_body,
    "gone in the body": gone_in_body,
    "gone before the answer": gone_before_answer,
    "not HTTP": garbage,
}


@dataclass(frozen=True)
class Usage:
    """Resources that the server's process uses."""

    memory_mib: float
    threads: int
    files: int

    @classmethod
    def of(cls, pid: int) -> Usage:
        status = Path(f"/proc/{pid}/status").read_text()
        values = {name: int(value) for name, value in re.findall(r"^(VmRSS|Threads):\s+(\d+)", status, re.MULTILINE)}
        return cls(values["VmRSS"] / 1024, values["Threads"], len(os.listdir(f"/proc/{pid}/fd")))


def start_server(run: str, folder: Path, args: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """The server's process and its port, when it is ready."""
    (folder / "token").write_text(TOKEN)
    command = [sys.executable, "-m", "reconv", "serve", f"soak={run}", "--port", "0", "--token-file"]
    log = folder / "log.txt"
    with log.open("wb") as output:
        process = subprocess.Popen([*command, str(folder / "token"), *LIMITS, *args], stdout=output, stderr=output)
    while "ready:" not in log.read_text():
        if process.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.1)
    print(log.read_text(), end="", flush=True)
    found = re.search(r"listening on http://\S+:(\d+)", log.read_text())
    assert found is not None
    return process, int(found[1])


def run_soak(soak: Soak, process: subprocess.Popen[bytes], minutes: float, clients: int) -> list[Usage]:
    """Send requests for some minutes; what the server used, every second."""
    targets = [(soak.good_client, clients), (soak.bad_client, clients)]
    threads = [threading.Thread(target=t, args=(seed,)) for t, count in targets for seed in range(count)]
    for thread in threads:
        thread.start()
    usages: list[Usage] = []
    end_s = time.monotonic() + 60 * minutes
    while time.monotonic() < end_s and process.poll() is None:
        time.sleep(1)
        usages.append(Usage.of(process.pid))
    soak.stop.set()
    for thread in threads:
        thread.join()
    return usages


def check_end(soak: Soak, process: subprocess.Popen[bytes], usages: list[Usage]) -> list[str]:
    """Problems found at the end."""
    problems = [f"wrong: {count} x {text}" for text, count in Counter(soak.wrong).most_common()]
    if process.poll() is not None:
        return [*problems, f"the server has ended with {process.returncode}"]
    time.sleep(8)  # connections that are being closed are cut after five seconds
    first, last = usages[len(usages) // 4], Usage.of(process.pid)
    print(f"\nafter a quarter {first}\nat the end      {last}")
    if last.memory_mib > first.memory_mib + MAX_GROWTH_MIB:
        problems.append(f"memory has grown by {last.memory_mib - first.memory_mib:.0f} MiB")
    if last.threads > first.threads:
        problems.append(f"threads: {first.threads} -> {last.threads}")
    if last.files > usages[0].files:
        problems.append(f"open files: {usages[0].files} -> {last.files}")
    process.send_signal(signal.SIGTERM)
    if process.wait(60) != 0:
        problems.append(f"exit code {process.returncode} after SIGTERM")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a trained classifier")
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=4, help="good ones, and as many bad ones")
    parser.add_argument("args", nargs="*", help="further arguments of `reconv serve`, after --")
    options = parser.parse_args()
    images = [image_file(seed) for seed in range(16)]
    predictor = Predictor.load(options.run, device="cpu", backend="eager")
    predictions = [predictor.predict([image], top=1000)[0] for image in images]
    expected = [{item.name: item.score for item in prediction.classes} for prediction in predictions]
    with tempfile.TemporaryDirectory() as folder:
        process, port = start_server(options.run, Path(folder), options.args)
        soak = Soak(port, images, expected)
        try:
            usages = run_soak(soak, process, options.minutes, options.clients)
            problems = check_end(soak, process, usages)
        finally:
            process.kill()
    print(f"\n{'request':<24}{'sent':>9}  answers")
    for kind, outcomes in sorted(soak.results.items()):
        answers = ", ".join(f"{name}: {count:,}" for name, count in outcomes.most_common())
        print(f"{kind:<24}{outcomes.total():>9,}  {answers}")
    times = np.array(soak.latencies_s or [0]) * 1000
    print(f"good requests: p50 {np.percentile(times, 50):.1f} ms, p99 {np.percentile(times, 99):.1f} ms")
    print("\n".join(problems) or "nothing wrong")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
