"""An error that ends several ranks is printed once, even if the launcher kills all ranks when the first one exits."""

from __future__ import annotations

import socket
import sys
import time
from pathlib import Path

import pytest
from ranks import environment, in_ranks, start

from reconv.cli import main
from reconv.core.errors import DataError, DivergedError, ExitCode, ReconvError, UsageError
from reconv.distributed.failure import report_failures
from reconv.distributed.process_group import open_process_group

LIMIT_S = 60


def run_command(*args: str) -> None:
    """One rank of a command, with its errors in stderr.txt."""
    sys.stderr = Path("stderr.txt").open("a", buffering=1)  # noqa: SIM115 (until the process exits)
    sys.exit(main(list(args)))


def test_an_error_of_rank_0_is_printed_before_any_rank_exits() -> None:
    ranks = [process for process, _ in start(2, run_command, "train", "quickstrt", "--out", "run")]
    deadline_s = time.monotonic() + LIMIT_S
    while all(rank.is_alive() for rank in ranks) and time.monotonic() < deadline_s:
        time.sleep(0.01)
    for rank in ranks:  # as mpirun does
        rank.kill()
        rank.join()
    assert Path("stderr.txt").read_text().count("error:") == 1
    assert ExitCode.USAGE in [rank.exitcode for rank in ranks]


ERRORS = {"data": DataError("no such image"), "bug": KeyError("image"), "diverged": DivergedError("not a number")}


def fail_in(failing: list[int], kind: str) -> tuple[int, bool]:
    """One rank: some ranks fail, the others wait for them; returns the exit code, and whether another rank prints."""
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
    raise AssertionError("no rank has failed")


@pytest.mark.parametrize(
    ("failing", "kind", "code"),
    [
        ([0], "data", ExitCode.DATA),
        ([2], "bug", ExitCode.UNEXPECTED),
        ([0, 1, 2], "bug", ExitCode.UNEXPECTED),
        ([0, 1, 2], "diverged", ExitCode.DIVERGED),
    ],
)
def test_one_failing_rank_prints_and_all_exit_with_its_code(failing: list[int], kind: str, code: ExitCode) -> None:
    results = in_ranks(3, fail_in, failing, kind)
    assert [exit_code for exit_code, _ in results] == [code] * 3
    printing = [rank for rank, (_, is_reported) in enumerate(results) if not is_reported]
    assert len(printing) == 1 and printing[0] in failing


def fail_one_after_the_other() -> bool:
    """One rank: rank 1 fails once rank 0 has left; whether another rank prints the error."""
    process_group, has_left = open_process_group(), Path("rank 0 has left")
    while process_group.rank == 1 and not has_left.exists():
        time.sleep(0.01)
    is_reported = process_group.report_failure(DataError("no such image"))
    process_group.close("failed")
    has_left.touch()
    return is_reported


def test_the_store_of_rank_0_lives_until_all_ranks_have_reported() -> None:
    assert in_ranks(2, fail_one_after_the_other) == [False, True]


def test_a_port_in_use_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        for name, value in environment(0, 2, port).items():
            monkeypatch.setenv(name, value)
        with pytest.raises(UsageError, match="cannot listen") as exc_info:
            open_process_group()
    assert str(port) in exc_info.value.where and "set another MASTER_PORT" in exc_info.value.hint
