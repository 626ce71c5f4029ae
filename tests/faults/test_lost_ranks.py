"""Ranks that are killed, stopped or fail: the others end, and say whom they lost."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from PIL import Image
from ranks import start

import reconv
from reconv.distributed.failure import report_failures
from reconv.distributed.process_group import open_process_group
from reconv.errors import ExitCode, RankLostError, ReconvError
from reconv.logging.events import RunEnded, read_events

# Steps go on until somebody ends them. Signs of life are late after 4 s here and after 30 s by default.
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
    """Train until something happens; a file of each rank has the words, and the process its code."""
    given = [(field, value, "--set") for field, value in settings.items()]
    sys.stderr = Path(f"{out}-{os.environ['RANK']}.txt").open("w", buffering=1)  # noqa: SIM115 (until the end)
    try:
        reconv.train("quickstart", out=out, overrides=given)
    except ReconvError as error:
        if not error.is_reported:
            print(f"error: {error}", file=sys.stderr)
        sys.exit(error.code)


def wait_for(path: Path, limit_s: float = 60) -> None:
    deadline_s = time.monotonic() + limit_s
    while not (path.exists() and "step 20/" in path.read_text()):
        assert time.monotonic() < deadline_s, f"{path} never told of step 20"
        time.sleep(0.05)


def end(started: list[tuple[Any, Any]]) -> None:
    for process, _ in started:
        process.kill()
        process.join()


def words_of(folder: Path, rank: int) -> str:
    return Path(f"{folder}-{rank}.txt").read_text()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_survivors_end_with_code_7_and_name_the_rank_its_phase_and_its_stack(number: signal.Signals) -> None:
    folder = Path.cwd() / "lost"
    started = start(3, train_on, str(folder), SETTINGS)
    try:
        wait_for(folder / "logs/rank-1.log")
        os.kill(started[1][0].pid, number)
        for rank in (0, 2):
            started[rank][0].join(55)
            assert started[rank][0].exitcode == ExitCode.RANK_LOST
    finally:
        end(started)
    words = words_of(folder, 0) + words_of(folder, 2)
    assert words.count("rank 1 is lost") == 1, words  # by the first that notices
    assert f"process {started[1][0].pid}" in words
    assert "last phase: " in words and "last stack" in words and ".py:" in words
    ended = [event for event in read_events(folder / "events.jsonl") if isinstance(event, RunEnded)]
    assert [(event.exit_code, event.reason[:14]) for event in ended] == [(ExitCode.RANK_LOST, "rank 1 is lost")]


def meet_and_lose(out: str) -> None:
    """Rank 1 ends as soon as it is there; rank 0 leaves a file with who is lost."""
    process_group = open_process_group()
    if process_group.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        with report_failures(process_group):
            process_group.all_gather(0)
    except RankLostError as error:
        Path(out).write_text(f"{error.what}; {error.where}")


def test_a_rank_that_ends_before_its_first_second_is_known_by_name() -> None:
    told = Path.cwd() / "told"
    started = start(2, meet_and_lose, str(told))
    try:
        started[0][0].join(55)
    finally:
        end(started)
    assert "rank 1 is lost" in told.read_text() and f"process {started[1][0].pid}" in told.read_text()


@pytest.mark.slow
def test_the_end_of_rank_0_ends_the_others() -> None:
    folder = Path.cwd() / "lost"
    started = start(2, train_on, str(folder), SETTINGS)
    try:
        wait_for(folder / "logs/rank-1.log")
        os.kill(started[0][0].pid, signal.SIGKILL)
        started[1][0].join(55)
        assert started[1][0].exitcode == ExitCode.RANK_LOST
        assert "rank 0" in words_of(folder, 1)
    finally:
        end(started)


def test_what_ends_one_rank_is_told_once_and_ends_all_with_the_same_code() -> None:
    pictures(Path.cwd() / "images")
    folder = Path.cwd() / "failed"
    settings = {**SETTINGS, "data.source": "folder", "data.path": str(Path.cwd() / "images"), "batch.size": "32"}
    settings |= {"data.drop_last": False, "parallel.heartbeat_timeout_s": "30"}  # what is slow here is not lost
    started = start(2, train_on, str(folder), settings)
    try:
        for process, _ in started:
            process.join(55)
            assert process.exitcode == ExitCode.DATA
    finally:
        end(started)
    words = words_of(folder, 0) + words_of(folder, 1)
    assert words.count("error:") == 1 and "bad.png" in words


def pictures(folder: Path) -> None:
    """Two classes of small images, one of them not an image at all."""
    for split in ("train", "val"):
        for label, shade in (("dark", 40), ("light", 200)):
            (folder / split / label).mkdir(parents=True)
            for number in range(8):
                Image.new("L", (8, 8), shade + number).save(folder / split / label / f"{number}.png")
    (folder / "train" / "dark" / "bad.png").write_bytes(b"no image")
