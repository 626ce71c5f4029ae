"""`reconv train --devices 2` that somebody ends: what is said, with which code, and that nobody is left.

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

from reconv.errors import ExitCode

LIMIT_S = 120
SETTINGS = ["length=100000step", "schedule.warmup=0ep", "save.every=90000step", "evaluate.every=off"]
SETTINGS += ["engine.num_threads=1", "parallel.heartbeat_timeout_s=10"]

pytestmark = pytest.mark.slow


def ended_by(number: signal.Signals, whom: str) -> tuple[int, str]:
    """The code and the words of a training that a signal ended: of one of its ranks, of the launcher or of all."""
    with training() as launcher:
        ranks = wait_for_ranks()
        if whom == "all":
            os.killpg(launcher.pid, number)
        else:
            os.kill(launcher.pid if whom == "launcher" else ranks[int(whom)], number)
        code = launcher.wait(LIMIT_S)
        assert [pid for pid in ranks if Path(f"/proc/{pid}").exists()] == []
    return code, Path("said.txt").read_text()


@contextmanager
def training() -> Iterator[subprocess.Popen[bytes]]:
    """A training of two ranks in a session of its own, whose words go into a file."""
    words = [word for setting in SETTINGS for word in ("--set", setting)]
    command = [sys.executable, "-m", "reconv", "train", "quickstart", "--out", "run", "--devices", "2", *words]
    with Path("said.txt").open("w") as said:
        launcher = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=said, start_new_session=True)
        try:
            yield launcher
        finally:
            if launcher.poll() is None:
                os.killpg(launcher.pid, signal.SIGKILL)
                launcher.wait()


def wait_for_ranks() -> list[int]:
    """The processes of both ranks, once they train."""
    logs = [Path(f"run/logs/rank-{rank}.log") for rank in range(2)]
    wait_for(lambda: all(log.exists() and "step 20/" in log.read_text() for log in logs))
    return [writer_of(log) for log in logs]


def wait_for(has_come: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + LIMIT_S
    while not has_come():
        assert time.monotonic() < deadline_s, Path("said.txt").read_text()
        time.sleep(0.05)


def has_ranks(session: int) -> bool:
    """Whether a process of a session was started by multiprocessing, and imports torch or has."""
    for file in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            is_rank = os.getsid(int(file.parts[2])) == session and b"spawn_main" in file.read_bytes()
            if is_rank and "libtorch" in file.with_name("maps").read_text():
                return True
        except OSError:
            continue  # it has ended
    return False


def writer_of(log: Path) -> int:
    """Who has a file open."""
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            if link.readlink() == log.resolve():
                return int(link.parts[2])
        except OSError:
            continue  # of a process that has ended, or of somebody else
    raise AssertionError(f"nobody writes {log}")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_is_killed_is_named_with_its_phase_and_stack(rank: int) -> None:
    code, said = ended_by(signal.SIGKILL, str(rank))
    assert code == ExitCode.RANK_LOST
    assert f"rank {rank} was killed by SIGKILL" in said and said.count("error:") == 1
    assert "last phase: " in said and re.search(r"\.py:\d+ in ", said)
    assert re.search(r"^[WE]\d{4} |Traceback", said, re.MULTILINE) is None, said  # torch's own lines


def test_a_rank_that_is_stopped_is_named_and_ended() -> None:
    code, said = ended_by(signal.SIGSTOP, "1")
    assert code == ExitCode.RANK_LOST
    assert "rank 1 is lost" in said and "T (stopped)" in said and said.count("error:") == 1


@pytest.mark.parametrize(("number", "whom"), [(signal.SIGINT, "all"), (signal.SIGTERM, "launcher")])
def test_a_training_that_is_asked_to_stop_saves_and_says_so_once(number: signal.Signals, whom: str) -> None:
    code, said = ended_by(number, whom)
    assert code == ExitCode.PREEMPTED
    assert said.count(f"stopped by {number.name} after step") == 1 and "error" not in said, said
    assert len(list(Path("run/checkpoints").glob("step-*/manifest.json"))) == 1


def test_a_training_that_is_interrupted_while_its_ranks_start_says_so_in_one_line() -> None:
    with training() as launcher:
        wait_for(lambda: has_ranks(launcher.pid))
        os.killpg(launcher.pid, signal.SIGINT)
        assert launcher.wait(LIMIT_S) == ExitCode.INTERRUPTED
    assert len(Path("said.txt").read_text().split("\n")) <= 3, Path("said.txt").read_text()
    assert not has_ranks(launcher.pid)
