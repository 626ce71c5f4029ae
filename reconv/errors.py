"""The errors a person is meant to read, each with the exit code the contract gives it.

Owns the exit codes. Refuses to know who raises or prints. Invariant: a `ReconvError` says what happened, where,
why likely, and what to type next; everything else that escapes is a bug and ends with code 1.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import IntEnum
from typing import Any


class Exit(IntEnum):
    """Exit codes of the `reconv` process."""

    DONE = 0
    UNEXPECTED = 1
    USAGE = 2  # usage, recipe, recipe changed under --resume, a missing extra
    DATA = 3
    CHECKPOINT = 4  # checkpoint or weights missing, corrupt or of another model
    DIVERGED = 5
    RESOURCES = 6  # out of memory, disk, or an unwritable folder
    LOST_PEER = 7
    IN_USE = 8  # the run folder belongs to another process
    PREEMPTED = 75  # saved; please requeue
    INTERRUPTED = 130  # Ctrl-C without a save
    TERMINATED = 143  # SIGTERM without a save


class ReconvError(Exception):
    """An error with an exit code, a cause in words and the next command to type."""

    code: Exit = Exit.UNEXPECTED
    is_told = False  # by another process, to the same person

    def __init__(self, what: str, *, where: str = "", why: str = "", then: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.then = then

    def __str__(self) -> str:
        lines = [self.what]
        lines += [f"  where: {self.where}"] if self.where else []
        lines += [f"  why:   {self.why}"] if self.why else []
        lines += [f"  next:  {self.then}"] if self.then else []
        return "\n".join(lines)

    def record(self) -> dict[str, Any]:
        """The error as plain data, for other processes."""
        told = {"what": self.what, "where": self.where, "why": self.why, "then": self.then}
        return {**told, "code": int(self.code), "is_told": self.is_told}


class UsageError(ReconvError):
    code = Exit.USAGE


class RecipeError(ReconvError):
    code = Exit.USAGE


class DataError(ReconvError):
    code = Exit.DATA


class CheckpointError(ReconvError):
    code = Exit.CHECKPOINT


class DivergedError(ReconvError):
    code = Exit.DIVERGED


class ResourceError(ReconvError):
    code = Exit.RESOURCES


class LostPeerError(ReconvError):
    code = Exit.LOST_PEER


class PeerError(ReconvError):
    """What ended another process ends this one too, with its code."""

    code = Exit.LOST_PEER

    @classmethod
    def of(cls, error: ReconvError, is_told: bool = False) -> PeerError:
        """The same error, for those it did not happen to."""
        return cls.from_record({**error.record(), "is_told": is_told})

    @classmethod
    def from_record(cls, told: Mapping[str, Any]) -> PeerError:
        """An error as it was in the process it happened to."""
        error = cls(told["what"], where=told["where"], why=told["why"], then=told["then"])
        error.code, error.is_told = Exit(told["code"]), told["is_told"]
        return error

    def __reduce__(self) -> tuple[Callable[..., PeerError], tuple[object, ...]]:
        return PeerError.from_record, (self.record(),)


class InUseError(ReconvError):
    code = Exit.IN_USE


class PreemptedError(ReconvError):
    code = Exit.PREEMPTED


class InterruptError(ReconvError):
    """A second Ctrl-C in one process, as the others hear of it."""

    code = Exit.INTERRUPTED

    def __init__(self, what: str = "interrupted without a save") -> None:
        super().__init__(what, then="run the same command with --resume")


class TerminatedError(ReconvError):
    code = Exit.TERMINATED
