"""The last words of processes that `--devices` has started, left for the one that started them.

Owns the folder they are left in. Refuses to know who prints them. Invariant: they are whole before a process ends, so
whoever sees that it has ended can read why.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reconv.distributed.process_group import Outcome, ProcessGroup
from reconv.errors import ExitCode, InterruptedRunError, ReconvError, RemoteRankError

_ON_ALL_RANKS = (
    ExitCode.PREEMPTED,
    ExitCode.DIVERGED,
    ExitCode.INTERRUPTED,
    ExitCode.TERMINATED,
)  # found by all at the same step


def leave_words(folder: Path, rank: int, error: ReconvError) -> None:
    """Say what ends this process; what was said first stands."""
    said = folder / f"{rank}.json"
    if not said.exists():
        half = folder / f"{rank}.json.{os.getpid()}.part"
        half.write_text(json.dumps(error.to_dict()))
        half.rename(said)


def read_words(folder: Path) -> list[RemoteRankError]:
    """What each process has left, those first that nobody has told yet."""
    said = [RemoteRankError.from_dict(json.loads(file.read_text())) for file in sorted(folder.glob("*.json"))]
    return sorted(said, key=lambda error: error.is_reported)


@contextmanager
def report_failures(process_group: ProcessGroup) -> Iterator[None]:
    """Leave the process group at the end; report an error to the other ranks, or raise the one they have reported.

    An error that several ranks have in common is printed by one of them.
    """
    outcome: Outcome = "failed"
    try:
        yield
        outcome = "finished"
    except RemoteRankError:
        raise
    except ReconvError as error:
        if error.code in _ON_ALL_RANKS:
            outcome, error.is_reported = "stopped", not process_group.is_rank0
        else:
            error.is_reported = process_group.report_failure(error)
        raise
    except Exception as error:
        lost = process_group.diagnose(error)
        if lost is not None:
            raise lost from error
        mine = ReconvError(f"unexpected {type(error).__name__}: {error}")
        if process_group.report_failure(mine):
            raise RemoteRankError.of(mine, is_reported=True) from error
        raise
    except KeyboardInterrupt:
        process_group.report_failure(InterruptedRunError())
        raise
    finally:
        process_group.close(outcome)
