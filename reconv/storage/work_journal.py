"""The finished parts of a job, in a hidden folder beside its output, so that the same command continues after a kill.

Several processes may write different parts. A part counts only with its digest; parts of another plan are discarded.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reconv.core.errors import RunLockedError
from reconv.core.wait import ProcessWait
from reconv.storage import read_limits
from reconv.storage.bounded import read_bytes
from reconv.storage.files import disk_errors, write_atomic

_PLAN, _LOCK = "plan.json", "lock"
_DIGEST_BYTES = 32


class WorkJournal:
    """The parts of a job that are finished. `plan` is everything that decides their content, as JSON."""

    def __init__(self, folder: Path, plan: Mapping[str, Any]) -> None:
        self.folder = folder
        self._plan = (json.dumps(plan, sort_keys=True) + "\n").encode()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create or reopen the folder and keep other commands out of it."""
        with disk_errors(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = open(self.folder / _LOCK, "wb")  # noqa: SIM115
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunLockedError(
                    "the same command is already running",
                    where=str(self.folder),
                    why="its lock is held",
                    hint="wait for it, or write to another place",
                ) from error
            if self._recorded_plan() != self._plan:
                self._discard_parts()
                with disk_errors(self.folder):
                    write_atomic(self.folder / _PLAN, self._plan)
            yield

    def write(self, part: str, payload: bytes) -> None:
        """Keep a finished part."""
        with disk_errors(self.folder):
            write_atomic(self.folder / f"{part}.part", hashlib.sha256(payload).digest() + payload)

    def read(self, part: str) -> bytes | None:
        """A finished part; None if it is not there, or damaged."""
        try:
            content = read_bytes(self.folder / f"{part}.part", read_limits.STATE_BYTES)
        except OSError:
            return None
        digest, payload = content[:_DIGEST_BYTES], content[_DIGEST_BYTES:]
        return payload if hashlib.sha256(payload).digest() == digest else None

    def parts(self) -> list[str]:
        """The names of all parts, damaged ones included."""
        with disk_errors(self.folder):
            return sorted(path.stem for path in self.folder.glob("*.part"))

    def wait_for(self, part: str) -> bytes:
        """A part that another machine has just finished: a network file system may show it a little later."""
        wait = ProcessWait()
        while (payload := self.read(part)) is None:
            wait.tick(
                f"the file {part}.part",
                where=str(self.folder),
                hint="check that all machines see the same folder, then run the same command again",
            )
        return payload

    def _recorded_plan(self) -> bytes | None:
        try:
            return read_bytes(self.folder / _PLAN, read_limits.STATE_BYTES)
        except OSError:
            return None

    def _discard_parts(self) -> None:
        with disk_errors(self.folder):
            for path in self.folder.iterdir():
                if path.name != _LOCK:
                    path.unlink()


def remove_journal(folder: Path) -> None:
    """Delete the journal of a job whose output is written."""
    shutil.rmtree(folder, ignore_errors=True)
