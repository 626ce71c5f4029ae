"""Command lines that run in real ranks, for tests of commands that share their work."""

from __future__ import annotations

import contextlib
import io
from typing import NamedTuple

from ranks import in_ranks

from reconv.cli import main


class CommandResult(NamedTuple):
    """What one rank printed, and its exit code."""

    code: int
    out: str
    err: str


def run_command(args: list[str]) -> CommandResult:
    """Run a command line in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            main(args)
        except SystemExit as end:
            return CommandResult(int(end.code or 0), out.getvalue(), err.getvalue())
    raise AssertionError("main always exits")


def command_in_ranks(size: int, *args: object) -> list[CommandResult]:
    """Run a command line in `size` ranks of one process group."""
    results: list[CommandResult] = in_ranks(size, run_command, [str(arg) for arg in args])
    return results
