"""What ends several processes is read once, under launchers that end everybody as soon as one has ended."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ranks import environment, free_port, in_ranks

from reconv.distributed.failure import report_failures
from reconv.distributed.process_group import open_process_group
from reconv.errors import DataError, DivergedError, ExitCode, ReconvError, UsageError

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
    assert ExitCode.USAGE in codes


ERRORS = {"data": DataError("no such image"), "bug": KeyError("image"), "diverged": DivergedError("not a number")}


def fail_in(failing: list[int], kind: str) -> tuple[int, bool]:
    """One rank: some fail, the others wait for them; the code it ends with, and whether another tells people why."""
    process_group = open_process_group()
    try:
        with report_failures(process_group):
            if process_group.rank in failing:
                raise ERRORS[kind]
            process_group.all_gather(0)
    except ReconvError as error:
        return error.code, error.is_reported
    except KeyError:
        return ExitCode.UNEXPECTED, False
    raise AssertionError("nothing has failed")


@pytest.mark.parametrize(
    ("failing", "kind", "code"),
    [
        ([0], "data", ExitCode.DATA),
        ([1], "data", ExitCode.DATA),
        ([0, 1, 2], "data", ExitCode.DATA),
        ([2], "bug", ExitCode.UNEXPECTED),
        ([0, 1, 2], "bug", ExitCode.UNEXPECTED),
        ([0, 1, 2], "diverged", ExitCode.DIVERGED),
    ],
)
def test_one_of_those_that_fail_tells_it_and_all_end_with_its_code(
    failing: list[int], kind: str, code: ExitCode
) -> None:
    ended = in_ranks(3, fail_in, failing, kind)
    assert [ended_with for ended_with, _ in ended] == [code] * 3
    tellers = [rank for rank, (_, is_reported) in enumerate(ended) if not is_reported]
    assert len(tellers) == 1 and tellers[0] in failing


def fail_one_after_the_other() -> bool:
    """One rank: rank 1 fails once rank 0 has left; whether another tells people why."""
    process_group, has_left = open_process_group(), Path("rank 0 has left")
    while process_group.rank == 1 and not has_left.exists():
        time.sleep(0.01)
    is_reported = process_group.report_failure(DataError("no such image"))
    process_group.close("failing")
    has_left.touch()
    return is_reported


def test_rank_0_can_be_heard_until_all_have_said_what_they_had_to_say() -> None:
    assert in_ranks(2, fail_one_after_the_other) == [False, True]


def test_a_port_that_another_program_has_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for name, value in environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match="could not connect") as caught:
            open_process_group()
    assert str(port) in caught.value.where and "set another MASTER_PORT" in caught.value.then
