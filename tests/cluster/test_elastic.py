"""The agent of an elastic run on one machine: which ends of its ranks lead to another round."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from ranks import server

from reconv.cluster import rounds as policy
from reconv.cluster.elastic import ElasticWork, run_elastic
from reconv.cluster.launch import ElasticConfig
from reconv.core.errors import DataError, ExitCode, RankLostError, RemoteRankError, ResourceError, TerminatedError
from reconv.distributed.environment import read_launch_env


@pytest.fixture(autouse=True)
def _server() -> None:
    server()  # forks ranks in all tests


def run_rank(folder: str, what: str) -> tuple[int, int]:
    """One rank: leaves a file for each round in which it took part."""
    launch_env = read_launch_env()
    (Path(folder) / f"{launch_env.restart_count}-{launch_env.rank}").touch()
    while launch_env.rank == 1 and not (Path(folder) / f"{launch_env.restart_count}-0").exists():
        time.sleep(0.01)  # the end of rank 1 would end rank 0 before it has left its file
    is_first = launch_env.restart_count == 0
    if launch_env.rank == 1 and (what == "killed" or (what == "killed once" and is_first)):
        os.kill(os.getpid(), signal.SIGKILL)
    if launch_env.rank == 1 and what == "fails":
        raise DataError("no such image", where="here")
    if what == "waits":
        (Path(folder) / "pid").write_text(str(os.getpid()))
        time.sleep(60)
    return launch_env.rank, launch_env.world_size


def start(
    folder: Path, what: str, num_ranks: int = 2, usable: int = 8, run_id: Callable[[], str] = str
) -> tuple[int, int]:
    work = ElasticWork(
        function=run_rank,
        args=(str(folder), what),
        usable=lambda number: min(number, usable),
        job="",
        run_id=run_id,
        progress=str,
        finished=lambda: (0, 0),
    )
    return run_elastic(ElasticConfig(num_ranks=num_ranks), work)


def rounds(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def test_a_killed_rank_leads_to_another_round(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    assert start(tmp_path, "killed once") == (0, 2)
    assert rounds(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]
    printed = capfd.readouterr().err.splitlines()
    assert [line for line in printed if line.startswith("elastic: ")] == [  # torch may warn of a lost connection
        "elastic: round 1: 1 node, 2 ranks; this node: ranks 0 to 1",
        "elastic: rank 1 was killed by SIGKILL; starting again (1 of 3 without a new checkpoint)",
        "elastic: round 2: 1 node, 2 ranks; this node: ranks 0 to 1",
    ]


@pytest.mark.slow
def test_ranks_that_are_killed_again_and_again_end_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "MAX_RESTARTS", 1)
    with pytest.raises(RankLostError, match="rank 1 was killed by SIGKILL"):
        start(tmp_path, "killed")
    assert rounds(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]


def test_an_error_that_would_come_again_is_final(tmp_path: Path) -> None:
    with pytest.raises(RemoteRankError, match="no such image") as error:
        start(tmp_path, "fails")
    assert (error.value.code, error.value.is_reported) == (ExitCode.DATA, False)
    assert rounds(tmp_path) == ["0-0", "0-1"]


@pytest.mark.slow
def test_ranks_do_not_start_anew_when_the_run_directory_is_gone(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="no longer has the run"):
        start(tmp_path, "killed", run_id=lambda: "" if {"1-0", "1-1"} <= set(rounds(tmp_path)) else "run")
    assert rounds(tmp_path) == ["0-0", "0-1", "1-0", "1-1"]


@pytest.mark.slow
def test_no_more_ranks_are_started_than_can_share_the_batch(tmp_path: Path) -> None:
    assert start(tmp_path, "works", num_ranks=3, usable=2) == (0, 2)
    assert rounds(tmp_path) == ["0-0", "0-1"]


def test_a_stop_signal_ends_the_ranks_and_the_agent(tmp_path: Path) -> None:
    def stop() -> None:
        while not rounds(tmp_path):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop).start()
    with pytest.raises(TerminatedError):
        start(tmp_path, "waits", num_ranks=1)
    assert rounds(tmp_path) == ["0-0", "pid"]


@pytest.mark.slow
def test_ranks_stop_when_their_agent_is_killed(tmp_path: Path) -> None:
    """Slow: the agent is a process of its own, with its own fork server."""
    agent = server().Process(target=start, args=(tmp_path, "waits", 1))
    agent.start()
    while not (tmp_path / "pid").exists() or not (tmp_path / "pid").read_text():
        time.sleep(0.05)
    rank = Path("/proc") / (tmp_path / "pid").read_text()
    agent.kill()
    deadline_s = time.monotonic() + 30
    while rank.exists():
        assert time.monotonic() < deadline_s
        time.sleep(0.05)
