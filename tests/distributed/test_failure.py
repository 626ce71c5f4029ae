"""The state machine of a rank when another one fails, with heartbeats that a test controls."""

from __future__ import annotations

import os
import platform
import time
from collections.abc import Callable, Iterator
from typing import Any, cast

import pytest

from reconv.core.errors import DataError, ExitCode, RankLostError, ReconvError, RemoteRankError
from reconv.distributed import failure
from reconv.distributed.environment import LaunchEnv
from reconv.distributed.failure import FailureMonitor, RankState, choose_failure
from reconv.distributed.liveness import Beat, Heartbeat, Seen

TIMEOUT_S = 0.2


class FakeHeartbeat:
    """One other rank, whose heartbeats and errors are set by the test."""

    def __init__(self) -> None:
        self.phase = "training"
        self.peer = Beat(1, "training", "elsewhere", 4711, ["step.py:1 in run"])
        self.peers: dict[int, Seen[Beat | None]] = {1: Seen(self.peer, time.monotonic())}
        self.is_beating = True
        self.values: dict[str, dict[str, Any]] = {}
        self.sent: list[tuple[bool, bool]] = []
        self.messages = self

    def send(self, is_stopped: bool = False, is_exiting: bool = False) -> None:
        self.sent.append((is_stopped, is_exiting))

    def receive(self) -> bool:
        if self.is_beating:
            self.peers[1] = Seen(self.peer, time.monotonic())
        return True

    def store_silent_s(self) -> float:
        return 0.0

    def put_first(self, key: str, message: dict[str, Any]) -> dict[str, Any]:
        return self.values.setdefault(key, message)

    def get(self, key: str) -> dict[str, Any] | None:
        return self.values.get(key)

    def fail(self, error: ReconvError) -> None:
        self.values["failed"] = {"rank": 1, "host": platform.node(), **error.to_dict()}


@pytest.fixture
def heartbeat() -> FakeHeartbeat:
    return FakeHeartbeat()


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The exit codes with which the process would have been aborted; timeouts are short."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    for name, value in {"HEARTBEAT_S": 0.01, "_SHORT_TIMEOUT_S": TIMEOUT_S, "_NOTICE_S": 0.05}.items():
        monkeypatch.setattr(failure, name, value)
    return codes


@pytest.fixture
def monitor(heartbeat: FakeHeartbeat, exits: list[int]) -> Iterator[FailureMonitor]:
    monitor = FailureMonitor(LaunchEnv(rank=0, world_size=2), cast(Heartbeat, heartbeat), cast(Any, None), 30.0)
    monitor.heartbeat_timeout_s = TIMEOUT_S
    yield monitor
    monitor._stop_beating.set()
    monitor._state = RankState.EXITED  # ends its threads


def wait_until(condition: Callable[[], object]) -> None:
    deadline_s = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline_s
        time.sleep(0.005)


def test_a_finished_rank_stops_and_exits(monitor: FailureMonitor, heartbeat: FakeHeartbeat) -> None:
    assert monitor.state is RankState.RUNNING
    heartbeat.peer = Beat(2, "done", "elsewhere", 4711, [], is_stopped=True)
    monitor.finish()
    assert monitor.state is RankState.EXITED and heartbeat.sent[-1] == (True, False)


def test_a_lost_rank_aborts_a_stuck_process(
    monitor: FailureMonitor, heartbeat: FakeHeartbeat, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    errors: list[ReconvError] = []
    monitor.on_lost_rank = errors.append
    heartbeat.is_beating = False
    wait_until(lambda: exits)
    assert exits == [ExitCode.RANK_LOST] and monitor.state is RankState.ABORTING
    assert heartbeat.sent[-1] == (True, True)
    [error] = errors
    assert isinstance(error, RankLostError) and "rank 1 is lost" in error.what and "4711" in error.where
    assert "last phase: training" in error.why and "step.py:1 in run" in error.why
    assert capfd.readouterr().err.count("rank 1 is lost") == 1


def test_a_reported_error_aborts_a_stuck_process_and_is_not_printed_again(
    monitor: FailureMonitor, heartbeat: FakeHeartbeat, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    heartbeat.fail(DataError("no such image"))
    heartbeat.is_beating = False  # else the exit barrier would wait for it
    wait_until(lambda: exits)
    assert exits == [ExitCode.DATA]
    assert capfd.readouterr().err == ""


def test_a_save_is_not_interrupted(monitor: FailureMonitor, heartbeat: FakeHeartbeat, exits: list[int]) -> None:
    monitor.set_phase(failure.SAVING)
    heartbeat.is_beating = False
    time.sleep(3 * TIMEOUT_S)
    assert exits == [] and monitor.state is RankState.RUNNING
    monitor.set_phase("training")
    wait_until(lambda: exits)


def test_the_main_thread_reports_what_it_diagnoses(
    monitor: FailureMonitor, heartbeat: FakeHeartbeat, exits: list[int]
) -> None:
    heartbeat.is_beating = False
    error = monitor.diagnose()
    assert isinstance(error, RankLostError) and monitor.state is RankState.DIAGNOSING
    time.sleep(2 * TIMEOUT_S)
    assert exits == []  # nothing is aborted meanwhile
    assert not monitor.report(error)
    monitor.stop()
    assert monitor.state is RankState.STOPPED
    monitor.exit_barrier(has_failed=True)
    assert monitor.state is RankState.EXITED and heartbeat.sent[-1] == (True, True)


def test_only_the_first_error_is_printed(monitor: FailureMonitor, heartbeat: FakeHeartbeat) -> None:
    heartbeat.fail(DataError("no such image"))
    assert monitor.report(DataError("no such image"))  # rank 1 prints it
    assert not monitor.report(DataError("another error"))
    found = monitor.diagnose()
    assert isinstance(found, RemoteRankError) and found.is_reported and found.code == ExitCode.DATA
    monitor.stop()


LOST = RemoteRankError.of(RankLostError("rank 1 is lost: no heartbeat for 5 s", why="last phase: training"))
DATA = RemoteRankError.of(DataError("no such image"))


@pytest.mark.parametrize(
    ("errors", "exit_code", "what", "why"),
    [
        ([LOST, DATA], -9, "no such image", ""),  # the cause comes first
        ([DATA], 3, "no such image", ""),
        ([LOST], -9, "rank 1 was killed by SIGKILL", "last phase: training"),
        ([], -9, "rank 1 was killed by SIGKILL", ""),
        ([], 1, "rank 1 exited with code 1", "Traceback"),
    ],
)
def test_the_launching_process_prints_the_cause(
    errors: list[RemoteRankError], exit_code: int, what: str, why: str
) -> None:
    chosen = choose_failure(errors, rank=1, exit_code=exit_code, pid=4711, message="Traceback")
    assert (chosen.what, chosen.why, chosen.is_reported) == (what, why, False)
