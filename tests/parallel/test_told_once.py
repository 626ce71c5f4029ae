"""What ends several processes is read once, under launchers that end everybody as soon as one has ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

from ranks import environment, free_port

from reconv.errors import Exit

LIMIT_S = 60


def words_and_codes(*words: str) -> tuple[str, list[int]]:
    """What two ranks say, and the codes they end with, where the first to end has the other killed, as mpirun does."""
    port, said = free_port(), Path("said.txt")
    with said.open("w") as stderr:
        ranks = [
            subprocess.Popen(
                [sys.executable, "-m", "reconv", "train", *words],
                env={**os.environ, **environment(rank, 2, port)},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
            )
            for rank in range(2)
        ]
        deadline_s = time.monotonic() + LIMIT_S
        while all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        for rank in ranks:
            rank.kill()
        codes = [rank.wait() for rank in ranks]
    return said.read_text(), codes


def test_what_rank_0_refuses_is_said_before_any_rank_ends() -> None:
    said, codes = words_and_codes("quickstrt", "--out", "run")
    assert said.count("error:") == 1, said
    assert Exit.USAGE in codes
