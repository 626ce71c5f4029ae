"""Processes that torch's launcher starts inside this one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time

import pytest

from reconv.core.errors import DataError, ExitCode, RankLostError, RemoteRankError
from reconv.distributed.environment import read_launch_env
from reconv.distributed.launcher import forward_signals_during, launch


def run_rank(rank1: str) -> tuple[int, int]:
    launch_env = read_launch_env()
    if rank1 == "fails" and launch_env.rank == 1:
        raise DataError("no such image", where="here", hint="look elsewhere")
    if rank1 == "is killed" and launch_env.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return launch_env.rank, launch_env.world_size


@pytest.mark.slow
def test_the_result_or_error_of_a_rank_reaches_the_launching_process() -> None:
    """Slow: three starts of two processes, each of which imports torch."""
    assert launch(2, run_rank, "works") == (0, 2)
    with pytest.raises(RemoteRankError, match="no such image") as exc_info:
        launch(2, run_rank, "fails")
    assert (exc_info.value.code, exc_info.value.where, exc_info.value.is_reported) == (ExitCode.DATA, "here", False)
    with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
        launch(2, run_rank, "is killed")


def test_a_signal_before_processes_are_started_still_reaches_them() -> None:
    exit_codes = []

    def start() -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        child = multiprocessing.get_context("spawn").Process(target=time.sleep, args=(30,))
        child.start()
        child.join()
        exit_codes.append(child.exitcode)

    assert forward_signals_during(start) == [signal.SIGTERM]
    assert exit_codes == [-signal.SIGTERM]
