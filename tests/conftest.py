"""Set-up of every test: one torch thread, an empty working folder, the same random examples on every run."""

from __future__ import annotations

import gc
import os
import shutil
import signal
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType

import pytest
import torch

from reconv.core import code_folders, custom_code
from reconv.device.cpu import disable_broken_amx

# oneDNN reads its limits once, at its first use in a process: before any test.
disable_broken_amx()

# xdist already uses every core, and bitwise laws hold at equal thread counts.
torch.set_num_threads(1)

# Some tests send it, and the programs that they start inherit how it is handled: nohup ignores it.
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# The folders of tests are in memory where there is enough of it: a run calls fsync two dozen times, which takes
# milliseconds on a disk and nothing there.
_MEMORY_DISK, _MIN_FREE_BYTES = "/dev/shm", 8 * 2**30
if os.access(_MEMORY_DISK, os.W_OK) and shutil.disk_usage(_MEMORY_DISK).free > _MIN_FREE_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", _MEMORY_DISK)

# Kernels run in Triton's interpreter, which is chosen before Triton is imported, maybe by a conftest.py below this one.
# The GPU tests compile them; a worker of pytest-xdist knows of them by the environment, not by its arguments.
if "gpu" in sys.argv:
    os.environ["RECONV_GPU_TESTS"] = "1"
if "RECONV_GPU_TESTS" not in os.environ:
    os.environ["TRITON_INTERPRET"] = "1"


# Collecting makes objects that stay; looking for garbage among them took more than a second. On again when it is done.
gc.disable()


def pytest_configure(config: pytest.Config) -> None:
    """Make the examples of hypothesis the same in every run."""
    if config.getoption("markexpr") == "gpu":  # that machine may have no hypothesis
        return
    from hypothesis import settings

    settings.register_profile("reconv", deadline=None, derandomize=True, database=None, max_examples=50)
    settings.load_profile("reconv")


def pytest_collection_finish() -> None:
    """Leave modules and collected tests out of garbage collections, which took a third of a second each.

    Python looks for garbage at each 700 new objects, which takes a tenth of the time of some tests.
    """
    gc.set_threshold(20_000)
    gc.enable()
    gc.collect()
    gc.freeze()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say whether golden runs were compared bit by bit or within a tolerance."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
    reports = [report for report in reports if getattr(report, "when", "") == "call"]
    hows = Counter(how for report in reports for name, how in report.user_properties if name == "golden")
    for how, count in hows.items():
        terminalreporter.write_line(f"golden runs: {count} compared {how}")


@pytest.fixture(scope="module", autouse=True)
def _no_old_objects() -> Iterator[None]:
    """Leave what a test module has imported and cached out of the garbage collections of the modules after it."""
    yield
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in an own empty folder, so that no test writes runs/ into the checkout or finds the user's data."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("DATA_DIR", raising=False)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """One torch thread, whatever a run of an earlier test has set: two of them on a busy core wait for each other."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_loaded_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """No code of users is loaded or on the path: a test must neither find nor blame that of an earlier one."""
    monkeypatch.setattr(custom_code, "_roots", {})
    monkeypatch.setattr(custom_code, "_provided", {})
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if not entry.startswith(code_folders.PREFIX)])


@pytest.fixture
def no_blocking_pipe(tmp_path: Path) -> Iterator[None]:
    """Fail a test that waits for a named pipe, and release the threads that do: they would keep pytest from ending."""
    limit_s = 30

    def fail(number: int, frame: FrameType | None) -> None:
        for pipe in filter(Path.is_fifo, tmp_path.rglob("*")):
            with suppress(OSError):  # no thread waits for this one
                os.close(os.open(pipe, os.O_WRONLY | os.O_NONBLOCK))
        pytest.fail(f"waited for a named pipe for {limit_s} s")  # an OSError would be reported as a bad file

    before = signal.signal(signal.SIGALRM, fail)
    signal.setitimer(signal.ITIMER_REAL, limit_s, 1)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)
