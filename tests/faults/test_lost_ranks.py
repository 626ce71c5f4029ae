"""Ranks that are killed, stopped or fail: the others exit and report which rank was lost."""

from __future__ import annotations

import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ranks import start

import reconv
from reconv.core.errors import ExitCode, RankLostError, ReconvError
from reconv.distributed import liveness
from reconv.distributed import torch_group as distributed_group
from reconv.distributed.failure import report_failures
from reconv.distributed.process_group import open_process_group
from reconv.logging.event_log import read_events
from reconv.logging.events import RunEnded

# Training that never ends by itself. A heartbeat is late after 4 s here, and after 30 s by default.
SETTINGS = {
    "length": "100000step",
    "schedule.warmup": "0ep",
    "batch.group": "16",
    "save.every": "off",
    "evaluate.every": "off",
    "engine.num_threads": "1",
    "parallel.heartbeat_timeout_s": "4",
}


def train_on(out: str, settings: dict[str, str]) -> None:
    """One rank that trains until something happens; its errors go to a file, and its exit code is that of the error."""
    overrides = [(field, value, "--set") for field, value in settings.items()]
    sys.stderr = Path(f"{out}-{os.environ['RANK']}.txt").open("w", buffering=1)  # noqa: SIM115 (until the process exits)
    try:
        reconv.train("quickstart", out=out, overrides=overrides)
    except ReconvError as error:
        if not error.is_reported:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)


def wait_for(path: Path, limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s
    while not (path.exists() and "step 20/" in path.read_text()):
        assert time.monotonic() < deadline_s, f"{path} never reached step 20"
        time.sleep(0.05)


def kill_all(started: list[tuple[Any, Any]]) -> None:
    for process, _ in started:
        process.kill()
        process.join()


def stderr_of(folder: Path, rank: int) -> str:
    return Path(f"{folder}-{rank}.txt").read_text()


@pytest.mark.slow  # `make faults` has more of these, without a look at the message
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_exit_with_code_7_and_name_the_lost_rank_its_phase_and_stack(number: signal.Signals) -> None:
    folder = Path.cwd() / "lost"
    started = start(3, train_on, str(folder), SETTINGS)
    try:
        wait_for(folder / "logs/rank-1.log")
        os.kill(started[1][0].pid, number)
        for rank in (0, 2):
            started[rank][0].join(55)
            assert started[rank][0].exitcode == ExitCode.RANK_LOST
    finally:
        kill_all(started)
    stderr = stderr_of(folder, 0) + stderr_of(folder, 2)
    assert stderr.count("rank 1 is lost") == 1, stderr  # by the first rank that notices
    assert f"process {started[1][0].pid}" in stderr
    assert "last phase: " in stderr and re.search(r"last stack .*:\n +\w+\.py:\d+ in ", stderr)
    ended = [event for event in read_events(folder / "events.jsonl") if isinstance(event, RunEnded)]
    assert [(event.exit_code, event.reason[:14]) for event in ended] == [(ExitCode.RANK_LOST, "rank 1 is lost")]


def lose_rank_1(out: str) -> None:
    """Rank 1 is killed as soon as it has joined; rank 0 writes the error to a file."""
    process_group = open_process_group()
    if process_group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with report_failures(process_group):
            process_group.all_gather(0)
    except RankLostError as error:
        Path(out).write_text(f"{error.what}; {error.where}")


def test_a_rank_lost_within_its_first_second_is_named() -> None:
    error = Path.cwd() / "error.txt"
    started = start(2, lose_rank_1, str(error))
    try:
        started[0][0].join(55)
    finally:
        kill_all(started)
    assert "rank 1 is lost" in error.read_text() and f"process {started[1][0].pid}" in error.read_text()


def stop_while_connecting(out: str, victim: int) -> None:
    """The victim is stopped after it was seen, before gloo connects it; the other rank writes its error to a file."""
    monkeypatch = pytest.MonkeyPatch()
    monkeypatch.setattr(liveness, "SILENT_TIMEOUT_S", 2.0)
    if os.environ["RANK"] == str(victim):
        monkeypatch.setattr(distributed_group.dist, "init_process_group", lambda *args, **more: stop_process())
    try:
        open_process_group()
    except RankLostError as error:
        Path(out).write_text(str(error))
        sys.exit(error.code)


def stop_process() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_is_stopped_while_gloo_connects_is_lost(victim: int) -> None:
    error = Path.cwd() / "error.txt"
    started = start(2, stop_while_connecting, str(error), victim)
    try:
        started[1 - victim][0].join(55)
        assert started[1 - victim][0].exitcode == ExitCode.RANK_LOST
    finally:
        kill_all(started)
    # Rank 0 also has the store.
    assert ("rank 0 cannot be reached" if victim == 0 else "rank 1 is lost: silent for") in error.read_text()


@pytest.mark.slow
def test_other_ranks_exit_when_rank_0_is_lost() -> None:
    folder = Path.cwd() / "lost"
    started = start(2, train_on, str(folder), SETTINGS)
    try:
        wait_for(folder / "logs/rank-1.log")
        os.kill(started[0][0].pid, signal.SIGKILL)
        started[1][0].join(55)
        assert started[1][0].exitcode == ExitCode.RANK_LOST
        assert "rank 0" in stderr_of(folder, 1)
    finally:
        kill_all(started)


def test_an_error_of_one_rank_is_printed_once_and_all_exit_with_its_code() -> None:
    write_images(Path.cwd() / "images")
    folder = Path.cwd() / "failed"
    settings = {**SETTINGS, "data.source": "folder", "data.path": str(Path.cwd() / "images"), "batch.size": "32"}
    settings |= {
        "data.drop_last": False,
        "parallel.heartbeat_timeout_s": "30",
    }  # a slow machine must not look like a lost rank
    started = start(2, train_on, str(folder), settings)
    try:
        for process, _ in started:
            process.join(55)
            assert process.exitcode == ExitCode.DATA
    finally:
        kill_all(started)
    stderr = stderr_of(folder, 0) + stderr_of(folder, 1)
    assert stderr.count("error:") == 1 and "bad.png" in stderr


def write_images(folder: Path) -> None:
    """Two classes of small images, one of which is not an image."""
    for split in ("train", "val"):
        for label, shade in (("dark", 40), ("light", 200)):
            (folder / split / label).mkdir(parents=True)
            for number in range(8):
                Image.new("L", (8, 8), shade + number).save(folder / split / label / f"{number}.png")
    (folder / "train" / "dark" / "bad.png").write_bytes(b"no image")
