"""Someone who types what a page of the documentation says, and the photos that the tutorials start from."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from PIL import Image

ROOT = Path(__file__).parents[2]
FLOWERS = {"daisy": (240, 240, 240), "rose": (200, 30, 60), "tulip": (240, 150, 40)}
START_S = 120


def write_flowers(num_photos: int = 20) -> None:
    """`photos/CLASS/*.jpg`, and in `new/` one photo of each class."""
    for label, (name, color) in enumerate(FLOWERS.items()):
        for number in range(num_photos):
            write_photo(Path(f"photos/{name}/{number:03}.jpg"), color, 100 * label + number)
        write_photo(Path(f"new/{name}.jpg"), color, 1000 + label)


def write_photo(path: Path, color: tuple[int, int, int], seed: int) -> None:
    """A disc of one color on grass."""
    random = np.random.default_rng(seed)
    pixels = random.integers(20, 90, (44, 40, 3)) + np.array([0, 40, 0])
    rows, columns = np.mgrid[:44, :40]
    row, column = random.integers(14, 28, 2)
    pixels[(rows - row) ** 2 + (columns - column) ** 2 < random.integers(60, 160)] = color
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels.astype(np.uint8)).save(path, quality=92)


class Reader:
    """Someone who types what the page says; a server runs until the next one is started."""

    def __init__(self) -> None:
        programs = Path("bin").absolute()
        programs.mkdir()
        for name, words in (("reconv", "-m reconv"), ("python", "")):
            (programs / name).write_text(f'#!/bin/sh\nexec "{sys.executable}" {words} "$@"\n')
            (programs / name).chmod(0o755)
        self.env = {**os.environ, "PATH": f"{programs}{os.pathsep}{os.environ['PATH']}", "PYTHONPATH": str(ROOT)}
        self.server: subprocess.Popen[bytes] | None = None
        with socket.socket() as free:  # 8000 of the page may be taken
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def type(self, line: str) -> str:
        """Run a line; what it prints."""
        line = line.replace("8000", str(self.port))
        if line.startswith("reconv serve"):
            self.start(line)
            return ""
        done = subprocess.run(["bash", "-c", line], env=self.env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def start(self, line: str) -> None:
        self.stop()
        log = Path("server.log")
        with log.open("wb") as output:
            self.server = subprocess.Popen(["bash", "-c", f"exec {line}"], env=self.env, stdout=output, stderr=output)
        deadline = time.monotonic() + START_S
        while "ready" not in log.read_text():
            assert self.server.poll() is None and time.monotonic() < deadline, log.read_text()
            time.sleep(0.1)

    def stop(self) -> None:
        if self.server is not None:
            self.server.send_signal(signal.SIGTERM)
            assert self.server.wait(START_S) == 0
            self.server = None


@contextmanager
def page_reader() -> Iterator[Reader]:
    """A reader with one core: two threads that wait for each other are slow where other tests use the cores, too."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    reader = Reader()
    try:
        yield reader
    finally:
        os.sched_setaffinity(0, cores)
        if reader.server is not None:
            reader.server.kill()
            reader.server.wait()
