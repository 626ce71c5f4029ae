"""Errors meant for users, each with the exit code of the process it ends.

A `ReconvError` says what happened, where, why it is likely to have happened, and what to type next, each on one line
unless it is made of `printable_lines`. Any other exception that reaches the command line is a bug and ends with exit
code 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any

from reconv.core.text import printable, printable_lines


class ExitCode(IntEnum):
    """Exit codes of the `reconv` process."""

    OK = 0
    UNEXPECTED = 1
    USAGE = 2  # options, the recipe, a recipe changed under --resume, a missing extra
    DATA = 3
    CHECKPOINT = 4  # a checkpoint or weights file is missing, corrupt or of another model
    DIVERGED = 5
    RESOURCES = 6  # out of memory or disk space, the system refuses to read or write a file, or a device has failed
    RANK_LOST = 7  # or the processes of a server end again and again
    RUN_LOCKED = 8  # another process is using the run directory
    EXPORT = 9  # an exported model gives other results than the trained one, or does not run
    FAULTY_DEVICE = 10  # engine.verify has found wrong bits on the same rank twice
    PREEMPTED = 75  # a checkpoint was saved; requeue the job
    INTERRUPTED = 130  # Ctrl-C before a checkpoint was saved
    PIPE_CLOSED = 141  # the reader of the output has closed it, as in `reconv recipes | head -1`
    TERMINATED = 143  # SIGTERM or another stop signal, and no checkpoint was saved


class ReconvError(Exception):
    """An error with an exit code, a likely cause and the next command to type."""

    code: ExitCode = ExitCode.UNEXPECTED
    is_reported = False  # True: another process has already printed it

    def __init__(self, what: str, *, where: str = "", why: str = "", hint: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.hint = hint

    def __str__(self) -> str:
        lines = [printable(self.what)]
        lines += [f"  where: {printable(self.where)}"] if self.where else []
        lines += [f"  why:   {printable(self.why)}"] if self.why else []
        lines += [f"  hint:  {printable(self.hint)}"] if self.hint else []
        return "\n".join(lines)

    def _render_traceback_(self) -> list[str]:
        """Text that a notebook shows instead of a traceback, which `%tb` still shows."""
        return [f"{type(self).__name__}: {self}"]

    def to_dict(self) -> dict[str, Any]:
        """The error as plain data that can be sent to other processes."""
        text = {"what": self.what, "where": self.where, "why": self.why, "hint": self.hint}
        return {
            **{name: printable(value) for name, value in text.items()},
            "code": int(self.code),
            "is_reported": self.is_reported,
        }


def one_of(*lines: str) -> str:
    """A hint of one line, or of several lines of which each would do."""
    distinct = list(dict.fromkeys(lines))
    if len(distinct) < 2:
        return "".join(distinct)
    return printable_lines("one of", *(f"           {line}" for line in distinct))


class UsageError(ReconvError):
    code = ExitCode.USAGE


class RecipeError(ReconvError):
    code = ExitCode.USAGE


class DataError(ReconvError):
    code = ExitCode.DATA


class UnreadableDataError(DataError):
    """The system refuses to read a file of the data: no image is bad, so it is never left out instead."""

    code = ExitCode.RESOURCES


class ChangedDataError(UnreadableDataError):
    """An object was replaced in its store while it was in use; it is not a bad image either."""

    code = ExitCode.DATA


class CheckpointError(ReconvError):
    code = ExitCode.CHECKPOINT


class UnreadableRunError(CheckpointError):
    """The system refuses to read a file of a run: whether it is damaged is not known."""

    code = ExitCode.RESOURCES


class DivergedError(ReconvError):
    code = ExitCode.DIVERGED


class ResourceError(ReconvError):
    code = ExitCode.RESOURCES


class RankLostError(ReconvError):
    """Another rank has died or stopped responding."""

    code = ExitCode.RANK_LOST


class RemoteRankError(ReconvError):
    """The error of another rank, raised here with the same exit code."""

    code = ExitCode.RANK_LOST

    @classmethod
    def of(cls, error: ReconvError, is_reported: bool = False) -> RemoteRankError:
        """The same error, to raise on the ranks where it did not happen."""
        return cls.from_dict({**error.to_dict(), "is_reported": is_reported})

    @classmethod
    def from_dict(cls, fields: Mapping[str, Any]) -> RemoteRankError:
        """The error that `to_dict` described."""
        # `to_dict` has escaped the newlines that were not meant.
        texts = {name: printable_lines(*fields[name].split("\n")) for name in ("what", "where", "why", "hint")}
        error = cls(texts.pop("what"), **texts)
        error.code, error.is_reported = ExitCode(fields["code"]), fields["is_reported"]
        return error

    def __reduce__(self) -> tuple[Callable[..., RemoteRankError], tuple[object, ...]]:
        return RemoteRankError.from_dict, (self.to_dict(),)


class ServerProcessError(ReconvError):
    """A process of the server ends again and again."""

    code = ExitCode.RANK_LOST


class RunLockedError(ReconvError):
    """The run directory is in use by another process."""

    code = ExitCode.RUN_LOCKED


class ExportError(ReconvError):
    """An exported model gives other results than the trained one; it was not written."""

    code = ExitCode.EXPORT


class FaultyDeviceError(ReconvError):
    """A device or its memory has computed or kept wrong bits, again; found by all ranks at the same step."""

    code = ExitCode.FAULTY_DEVICE


class PreemptedError(ReconvError):
    """The run was asked to stop and has saved a checkpoint."""

    code = ExitCode.PREEMPTED


class InterruptedRunError(ReconvError):
    """A second Ctrl-C ended a rank; raised on the other ranks."""

    code = ExitCode.INTERRUPTED

    def __init__(self, what: str = "Interrupted before a checkpoint was saved") -> None:
        super().__init__(what, hint="run the same command with --resume")


class PipeClosedError(ReconvError):
    """The program that reads the output of a command has ended; a message would not be read."""

    code = ExitCode.PIPE_CLOSED
    is_reported = True


class TerminatedError(ReconvError):
    """SIGTERM ended the run before a checkpoint was saved."""

    code = ExitCode.TERMINATED
