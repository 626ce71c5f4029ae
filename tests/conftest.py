"""What every test stands on: one torch thread, an empty folder to work in, the same examples on every run."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
import torch
from hypothesis import settings

from reconv.device.amx import avoid_broken_tiles

# oneDNN reads its limits once, at its first use in a process: before any test.
avoid_broken_tiles()

# xdist uses every core already; and bitwise laws hold at equal thread counts.
torch.set_num_threads(1)

settings.register_profile("reconv", deadline=None, derandomize=True, database=None, max_examples=50)
settings.load_profile("reconv")


def pytest_configure(config: pytest.Config) -> None:
    """Run kernels in Triton's interpreter, but for the tests that need a GPU; Triton reads this when it is imported."""
    os.environ["TRITON_INTERPRET"] = "0" if config.getoption("markexpr") == "gpu" else "1"


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of one's own, so that no test writes runs/ into the checkout or finds the user's data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("DATA_DIR", raising=False)


@pytest.fixture
def nobody_waits(tmp_path: Path) -> Iterator[None]:
    """Fail where somebody waits for a named pipe, and let go of threads that do: they would keep the tests from ending.

    What is tested takes seconds at most; such a wait would be for ever.
    """
    most_s = 30

    def fail(number: int, frame: FrameType | None) -> None:
        for pipe in filter(Path.is_fifo, tmp_path.rglob("*")):
            with suppress(OSError):  # nobody waits for this one
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        pytest.fail(f"somebody waited for {most_s} s")  # no OSError, which would be told as a bad file

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, most_s, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
