"""`reconv train --devices 2` that is interrupted: its message and exit code, and that no process is left.

Slow: each starts a process that starts two, and all import torch.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from reconv.core.errors import ExitCode

LIMIT_S = 120
SETTINGS = ["length=100000step", "schedule.warmup=0ep", "save.every=90000step", "evaluate.every=off"]
SETTINGS += ["engine.num_threads=1", "parallel.heartbeat_timeout_s=10"]

pytestmark = pytest.mark.slow


def interrupt(number: signal.Signals, target: str) -> tuple[int, str]:
    """Exit code and stderr of a training after a signal to one of its ranks, the launcher or all processes."""
    with training() as launcher:
        ranks = wait_for_ranks()
        if target == "all":
            os.killpg(launcher.pid, number)
        else:
            os.kill(launcher.pid if target == "launcher" else ranks[int(target)], number)
        code = launcher.wait(LIMIT_S)
        assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    return code, Path("stderr.txt").read_text()


@contextmanager
def training() -> Iterator[subprocess.Popen[bytes]]:
    """A training of two ranks in a session of its own, with stderr in a file."""
    options = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "reconv", "train", "quickstart", "--out", "run", "--devices", "2", *options]
    with Path("stderr.txt").open("w") as stderr:
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=stderr, start_new_session=True)
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


def wait_for_ranks() -> list[int]:
    """The process ids of both ranks, once they train."""
    logs = [Path(f"run/logs/rank-{rank}.log") for rank in range(2)]
    wait_for(lambda: all(log.exists() and "step 20/" in log.read_text() for log in logs))
    return [writer_of(log) for log in logs]


def wait_for(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not condition():
        assert time.monotonic() < deadline_s, Path("stderr.txt").read_text()
        time.sleep(0.05)


def has_ranks(session: int) -> bool:
    """Whether a session has a process that multiprocessing has started and that has loaded torch."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_rank = os.getsid(int(file.parts[2])) == session and b"spawn_main" in file.read_bytes()
            if is_rank and "libtorch" in file.with_name("maps").read_text():
                return True
        except OSError:
            continue  # it has exited
    return False


def writer_of(log: Path) -> int:
    """The process that has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink() == log.resolve():
                return int(link.parts[2])
        except OSError:
            continue  # a process that has exited, or of another user
    raise AssertionError(f"no process writes {log}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_is_named_with_its_phase_and_stack(rank: int) -> None:
    code, stderr = interrupt(signal.SIGKILL, str(rank))
    assert code == ExitCode.RANK_LOST
    assert f"rank {rank} was killed by SIGKILL" in stderr and stderr.count("error:") == 1
    assert "last phase: " in stderr and re.search(r"\.py:\d+ in ", stderr)
    assert re.search(r"^[WE]\d{4} |Traceback", stderr, re.MULTILINE) is None, stderr  # lines of torch's launcher


def test_a_stopped_rank_is_named_and_terminated() -> None:
    code, stderr = interrupt(signal.SIGSTOP, "1")
    assert code == ExitCode.RANK_LOST
    assert "rank 1 is lost" in stderr and "T (stopped)" in stderr and stderr.count("error:") == 1


@pytest.mark.parametrize(
    ("number", "target"),
    [(signal.SIGINT, "all"), (signal.SIGTERM, "launcher"), (signal.SIGUSR1, "launcher"), (signal.SIGUSR2, "1")],
)
def test_an_interrupted_training_saves_and_prints_one_message(number: signal.Signals, target: str) -> None:
    code, stderr = interrupt(number, target)
    assert code == ExitCode.PREEMPTED
    assert stderr.count(f"stopped by {number.name} after step") == 1 and "error" not in stderr, stderr
    assert len(list(Path("run/checkpoints").glob("step-*/manifest.json"))) == 1


def test_an_interrupt_while_ranks_start_prints_one_line() -> None:
    with training() as launcher:
        wait_for(lambda: has_ranks(launcher.pid))
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(LIMIT_S) == ExitCode.INTERRUPTED
    assert len(Path("stderr.txt").read_text().split("\n")) <= 3, Path("stderr.txt").read_text()
    assert not has_ranks(launcher.pid)
