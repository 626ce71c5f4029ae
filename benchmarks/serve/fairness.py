"""Fairness and memory of `reconv serve`: 64 good clients alone, then beside 16 hostile ones, by turns.

    python -m benchmarks.serve.fairness RUN --minutes 30 --json fairness.json

RUN is a trained classifier. Every client has a token and an address of its own (127.x.y.z, so Linux only). A good
client sends an image of 96 pixels every two seconds on average. A hostile one sends what the limits allow, as much as
it can: the largest images, requests of many images, JSON of many lists, floods of small images, large bodies, slow
bodies and idle connections. Windows without and with hostile clients take turns, so that other work on the machine
disturbs both alike. Printed are the latencies of the good clients in both, of all and of the one that is worst off,
and the peak of the server's memory beside the bound of docs/how-to/serve.md. Exit code 1: a good request failed, or
the bound was passed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import multiprocessing
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.serve.http_load import percentile_s
from benchmarks.serve.soak import image_file

GOOD, HOSTILE = 64, 16
PAUSE_S = 2.0  # between the requests of a good client, on average
MAX_PAUSE_S = 8.0  # the server waits for the first request of a connection for 10 s
MIB = 1 << 20
SAMPLE_S = 0.05  # between two looks at the server's memory


@dataclass(frozen=True)
class Client:
    """A client of the server."""

    port: int
    address: str
    token: str

    @property
    def head(self) -> str:
        return f"Host: localhost\r\nAuthorization: Bearer {self.token}\r\n"

    def post(self, body: bytes, kind: str, path: str = "/predict") -> bytes:
        head = f"POST {path} HTTP/1.1\r\n{self.head}Content-Type: {kind}\r\nContent-Length: {len(body)}\r\n\r\n"
        return head.encode() + body

    async def connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        return await asyncio.open_connection("127.0.0.1", self.port, local_addr=(self.address, 0))


async def read_answer(reader: asyncio.StreamReader) -> tuple[int, bytes]:
    """The status and body of an answer."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = re.search(rb"content-length: (\d+)", head.lower())
    return int(head.split(b" ", 2)[1]), await reader.readexactly(int(length[1]) if length else 0)


# Good clients


async def good_client(client: Client, number: int, end_s: float, latencies_s: list[float], wrong: list[str]) -> None:
    """Send images at random times until the end."""
    chance, body = random.Random(f"{number} {end_s}"), image_file(number % 16)
    reader, writer = await client.connect()
    while (pause_s := min(MAX_PAUSE_S, chance.expovariate(1 / PAUSE_S))) < end_s - time.time():
        await asyncio.sleep(pause_s)
        began_s = time.perf_counter()
        try:
            writer.write(client.post(body, "image/jpeg"))
            status, answer = await asyncio.wait_for(read_answer(reader), 60)
        except (OSError, EOFError, TimeoutError) as error:
            wrong.append(type(error).__name__)
            reader, writer = await client.connect()
            continue
        latencies_s.append(time.perf_counter() - began_s)
        if status != 200 or b"classes" not in answer:
            wrong.append(str(status))
    writer.close()


async def _good(port: int, tokens: list[str], only: str, end_s: float) -> tuple[list[list[float]], list[str]]:
    latencies_s: list[list[float]] = [[] for _ in tokens]
    wrong: list[str] = []
    clients = [Client(port, f"127.2.0.{number + 1}", token) for number, token in enumerate(tokens)]
    tasks = (good_client(client, n, end_s, latencies_s[n], wrong) for n, client in enumerate(clients))
    await asyncio.gather(*tasks)
    return latencies_s, wrong


# Hostile clients


def png(width: int, height: int) -> bytes:
    """A PNG file of one color, which is small."""
    file = io.BytesIO()
    Image.fromarray(np.zeros((height, width), np.uint8)).save(file, "PNG")
    return file.getvalue()


def multipart(images: list[bytes]) -> tuple[bytes, str]:
    """A form of images, and its content type."""
    parts = (b'--x\r\nContent-Disposition: form-data; name="i"; filename="i"\r\n\r\n' + i + b"\r\n" for i in images)
    return b"".join(parts) + b"--x--\r\n", "multipart/form-data; boundary=x"


def hostile_bodies() -> dict[str, tuple[bytes, str]]:
    """Requests within the limits that cost the most, by their name."""
    encoded = base64.b64encode(image_file(0)).decode()
    return {
        "an image of 49 megapixels": (png(7000, 7000), "image/png"),
        "an image of 65,535 x 760": (png(65_535, 760), "image/png"),
        "64 images of 3 megapixels": multipart([png(2000, 1500)] * 64),
        "64 small images": multipart([image_file(1)] * 64),
        "64 small images in JSON": (json.dumps({"images": [encoded] * 64}).encode(), "application/json"),
        "JSON of 62,000 lists": (b'{"images": [' + b"[]," * 62_000 + b"[]]}", "application/json"),
        "JSON of 8 MB": (b'{"images": ["' + b"A" * 8_000_000 + b'"]}', "application/json"),
        "a body of 32 MB": (bytes(32_000_000), "image/jpeg"),
        "a small image": (image_file(2), "image/jpeg"),
    }


async def _send(client: Client, body: bytes, kind: str, end_s: float, counts: Counter[str]) -> None:
    """Send one body again and again until the end, on connections that are kept."""
    while time.time() < end_s:
        writer = None
        with suppress(OSError, EOFError, TimeoutError):
            reader, writer = await client.connect()
            while time.time() < end_s:
                writer.write(client.post(body, kind))
                status, _ = await asyncio.wait_for(read_answer(reader), max(0.1, end_s - time.time()))
                counts[str(status)] += 1
                if status != 200:
                    await asyncio.sleep(0.01)  # a program of one thread sends for all of them
        if writer is not None:
            writer.close()
        await asyncio.sleep(0.05)


async def _hold(client: Client, end_s: float, counts: Counter[str]) -> None:
    """Keep connections with half of a header or a body, and open others when they are closed."""
    while time.time() < end_s:
        with suppress(OSError, EOFError, TimeoutError):
            reader, writer = await client.connect()
            request = client.post(bytes(1000), "image/jpeg")
            writer.write(random.choice([request[:40], request[:-500]]))
            await asyncio.wait_for(reader.read(), max(0.1, end_s - time.time()))
            writer.close()
            counts["closed"] += 1
        await asyncio.sleep(0.05)


async def _hostile(port: int, tokens: list[str], only: str, end_s: float) -> dict[str, Counter[str]]:
    bodies = {name: body for name, body in hostile_bodies().items() if only in name}
    sent: dict[str, Counter[str]] = {name: Counter() for name in [*bodies, "half a request"]}
    tasks: list[Awaitable[None]] = []
    held = sent["half a request"]
    for number, token in enumerate(tokens):
        client = Client(port, f"127.3.0.{number + 1}", token)
        names = [name for position, name in enumerate(bodies) if (position - number) % min(3, len(bodies)) == 0]
        for name in names * 2:  # six connections of different kinds, and four that are held
            tasks.append(_send(client, *bodies[name], end_s, sent[name]))
        if not only:
            tasks += [_hold(client, end_s, held) for _ in range(4)]
    await asyncio.gather(*tasks)
    return sent


def in_process(function: Callable[..., Awaitable[Any]], pipe: Any) -> None:
    """Run the clients of each window that the pipe asks for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    pipe.send("ready")
    while (request := pipe.recv()) is not None:
        pipe.send(asyncio.run(function(*request)))  # type: ignore[arg-type]


# The server


def memory_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def memory_bound(size: int, channels: int, readers: int) -> int:
    """The bytes that the server may take beyond its models, with default limits, as in docs/how-to/serve.md."""
    from reconv.serve.limits import Limits

    limits = Limits()
    decoding = max(limits.max_decoding_bytes, 16 * limits.max_pixels)
    bodies = 2 * limits.max_buffered_bytes + 2 * readers * limits.max_body_bytes
    return bodies + 2 * readers * 17 * 10**6 + decoding + 2 * limits.max_queue * size * size * channels


def start_server(run: str, folder: Path, tokens: list[str], readers: int) -> tuple[subprocess.Popen[bytes], int]:
    (folder / "tokens").write_text("\n".join(tokens))
    options = ["--port", "0", "--token-file", str(folder / "tokens"), "--read-threads", str(readers)]
    log = folder / "log.txt"
    with log.open("wb") as output:
        command = [sys.executable, "-m", "reconv", "serve", f"model={run}", *options]
        process = subprocess.Popen(command, stdout=output, stderr=output)
    while "ready:" not in log.read_text():
        if process.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.1)
    found = re.search(r"listening on http://\S+:(\d+)", log.read_text())
    assert found is not None
    return process, int(found[1])


def watch_memory(pid: int, until: Callable[[], bool]) -> int:
    """The most memory that the server has taken until a condition is true."""
    peak = memory_bytes(pid)
    while not until():
        time.sleep(SAMPLE_S)
        peak = max(peak, memory_bytes(pid))
    return peak


# Windows


@dataclass
class Measured:
    """Latencies of the good clients and peaks of memory in the windows of one kind."""

    by_client: list[list[float]]
    p99_s: list[float]  # of each window
    peaks: list[int]

    @classmethod
    def empty(cls) -> Measured:
        return cls([[] for _ in range(GOOD)], [], [])

    def add(self, latencies_s: list[list[float]], peak: int) -> None:
        for known, new in zip(self.by_client, latencies_s, strict=True):
            known += new
        self.p99_s.append(percentile_s([s for each in latencies_s for s in each], 0.99))
        self.peaks.append(peak)

    @property
    def all_s(self) -> list[float]:
        return [s for each in self.by_client for s in each]


def measure(port: int, pid: int, tokens: list[str], only: str, windows: int, window_s: float) -> dict[str, Any]:
    """Run windows without and with hostile clients, by turns."""
    context = multiprocessing.get_context("spawn")
    pipes = []
    for function in (_good, _hostile):
        here, there = context.Pipe()
        context.Process(target=in_process, args=(function, there), daemon=True).start()
        here.recv()
        pipes.append(here)
    good, hostile = pipes
    results = {"alone": Measured.empty(), "beside": Measured.empty()}
    wrong: Counter[str] = Counter()
    sent: dict[str, Counter[str]] = {}
    for number in range(windows):
        kind = ("alone", "beside")[number % 2]
        end_s = time.time() + window_s
        good.send((port, tokens[:GOOD], only, end_s))
        if kind == "beside":
            hostile.send((port, tokens[GOOD:], only, end_s + 1))
        peak = watch_memory(pid, lambda: bool(good.poll()))
        latencies_s, errors = good.recv()
        results[kind].add(latencies_s, peak)
        wrong.update(errors)
        if kind == "beside":
            for name, outcomes in hostile.recv().items():
                sent.setdefault(name, Counter()).update(outcomes)
        time.sleep(2)  # for what is left of the hostile requests
        p99_ms = 1000 * results[kind].p99_s[-1]
        load = os.getloadavg()[0]
        print(f"{number + 1:4} {kind:7} p99 {p99_ms:7.1f} ms  {peak / MIB:6.0f} MiB  load {load:.1f}", flush=True)
    for pipe in pipes:
        pipe.send(None)
    return {"results": results, "wrong": wrong, "sent": sent}


def worst_ratio(results: Mapping[str, Measured]) -> float:
    """The largest ratio of a client's p99 beside hostile clients to its p99 without."""
    pairs = zip(results["beside"].by_client, results["alone"].by_client, strict=True)
    return max(percentile_s(beside, 0.99) / percentile_s(alone, 0.99) for beside, alone in pairs)


def figures(measured: Mapping[str, Any], loaded: int, bound: int) -> Iterator[tuple[str, float, str, int]]:
    """Name, value, unit and n of each figure."""
    results: Mapping[str, Measured] = measured["results"]
    for kind, text in (("alone", "64 good clients alone"), ("beside", "beside 16 hostile ones")):
        latencies_s = results[kind].all_s
        for fraction in (0.5, 0.99):
            value = 1000 * percentile_s(latencies_s, fraction)
            yield f"{text}: p{100 * fraction:.0f}", value, "ms", len(latencies_s)
    ratios = [b / a for a, b in zip(results["alone"].p99_s, results["beside"].p99_s, strict=False)]
    yield (
        "p99 beside hostile clients / alone, median of the windows",
        statistics.median(ratios),
        "x",
        len(ratios),
    )
    yield "the same of the client that is worst off, all windows", worst_ratio(results), "x", GOOD
    yield "good requests that failed", sum(measured["wrong"].values()), "", len(results["beside"].all_s)
    num_hostile = sum(outcomes.total() for outcomes in measured["sent"].values())
    yield "hostile requests", num_hostile, "", num_hostile
    yield "memory after loading", loaded / MIB, "MiB", 1
    yield "peak of the memory, beside hostile clients", max(results["beside"].peaks) / MIB, "MiB", len(ratios)
    yield "bound of the memory", (loaded + bound) / MIB, "MiB", 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", help="a trained classifier")
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--window-s", type=float, default=60)
    parser.add_argument("--size", type=int, default=28, help="side of the network's images, for the bound")
    parser.add_argument("--channels", type=int, default=3)
    parser.add_argument("--readers", type=int, default=2, help="threads that decode images")
    parser.add_argument("--only", default="", help="hostile requests whose name has this text")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    tokens = [f"token-{number}" for number in range(GOOD + HOSTILE)]
    windows = max(2, round(60 * options.minutes / options.window_s) // 2 * 2)
    with tempfile.TemporaryDirectory() as folder:
        process, port = start_server(options.run, Path(folder), tokens, options.readers)
        try:
            time.sleep(1)
            loaded = memory_bytes(process.pid)
            measured = measure(port, process.pid, tokens, options.only, windows, options.window_s)
        finally:
            process.terminate()
            process.wait(60)
    bound = memory_bound(options.size, options.channels, options.readers)
    found = list(figures(measured, loaded, bound))
    for name, outcomes in measured["sent"].items():
        print(f"{name:28} {dict(outcomes)}")
    print("failures of good requests:", dict(measured["wrong"]))
    for name, value, unit, n in found:
        print(f"{name:62} {value:10.4g} {unit:4} (n={n:,})")
    if options.json:
        options.json.write_text(json.dumps({"figures": found}))
    peak = max(measured["results"]["beside"].peaks)
    return int(bool(measured["wrong"]) or peak > loaded + bound)


if __name__ == "__main__":
    sys.exit(main())
