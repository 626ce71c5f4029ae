"""Processes started by torch's launcher inside this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from reconv.distributed.environment import read_launch_env
from reconv.distributed.launcher import forward_signals_during, launch
from reconv.errors import DataError, ExitCode, RankLostError, RemoteRankError


def place_or_end(ending: str) -> tuple[int, int]:
    launch_env = read_launch_env()
    if ending == "data" and launch_env.rank == 1:
        raise DataError("no such image", where="here", then="look elsewhere")
    if ending == "kill" and launch_env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return launch_env.rank, launch_env.world_size


@pytest.mark.slow
def test_what_comes_of_processes_is_told_in_the_first() -> None:
    """Slow: three starts of two processes, each of which imports torch."""
    assert launch(2, place_or_end, "well") == (0, 2)
    with pytest.raises(RemoteRankError, match="no such image") as caught:
        launch(2, place_or_end, "data")
    assert (caught.value.code, caught.value.where, caught.value.is_reported) == (ExitCode.DATA, "here", False)
    with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
        launch(2, place_or_end, "kill")


def test_a_signal_that_comes_before_processes_are_started_ends_them() -> None:
    codes = []

    def start() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
        child.start()
        child.join()
        codes.append(child.exitcode)

    assert forward_signals_during(start) == [signal.SIGTERM]
    assert codes == [-signal.SIGTERM]
