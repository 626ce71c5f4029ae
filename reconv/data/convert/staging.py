"""The folder a conversion is made in, beside its destination, until it is whole.

Owns temporary names, syncing, the lock and what is remembered of finished pieces. Refuses to know what a piece is.
Invariant: the destination appears by one rename, whole, with its manifest; a piece counts as done only when its bytes
and its record are on the disk; a conversion that was killed goes on if its plan is the same, and no other one does.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from reconv.errors import DataError, ResourceError, RunLockedError, UsageError
from reconv.io.atomic import atomic_writer, fsync_dir

MANIFEST = "reconv.json"
_JOURNAL = ".journal"

Facts = Mapping[str, Any]


def finished(destination: Path, plan: Facts) -> Facts | None:
    """The manifest of an equal conversion that is complete; None if the destination is free."""
    if not destination.exists():
        return None
    manifest = destination / MANIFEST
    if manifest.is_file():
        facts = _read_json(manifest)
        if facts.get("plan") == plan:
            return facts
        why = "it holds another conversion: other data or other options"
    elif destination.is_dir() and not any(destination.iterdir()):
        return None
    else:
        why = "it holds something else, and nothing of yours is written over"
    raise UsageError(f"{destination} is there already", where=str(destination), why=why, then="name a new folder")


class StagingDir:
    """An unfinished conversion: pieces that are done and pieces to come."""

    def __init__(self, destination: Path, plan: Facts) -> None:
        self._destination = destination
        self._plan = plan
        self.path = destination.with_name(f".{destination.name}.converting")
        self._journal = self.path / _JOURNAL

    @contextmanager
    def held(self) -> Iterator[None]:
        """The room, made or found again, with nobody else in it."""
        with _writing(self.path):
            self._journal.mkdir(parents=True, exist_ok=True)
            lock = open(self._journal / "lock", "wb")  # noqa: SIM115
        with lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunLockedError(
                    f"{self._destination} is being converted by another process",
                    where=str(self.path),
                    why="its lock is held",
                    then="wait for it, or name another folder",
                ) from error
            self._agree()
            yield

    def record(self, piece: str) -> Facts | None:
        """What was noted about a finished piece."""
        file = self._journal / f"{piece}.json"
        return _read_json(file) if file.is_file() else None

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """A file that gets its name once the block is left and its bytes are on the disk."""
        temporary, final = self._journal / f"{name.replace('/', '-')}.tmp", self.path / name
        with _writing(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(final, temporary) as file:
                yield file

    def make_folder(self, path: Path) -> None:
        """Make a folder of the room and its parents."""
        with _writing(path):
            path.mkdir(parents=True, exist_ok=True)

    def put_unsynced(self, path: Path, data: bytes) -> None:
        """Write a small file of a piece; the piece is synced as a whole before it counts as done."""
        with _writing(path):
            path.write_bytes(data)

    def done(self, piece: str, facts: Facts) -> None:
        """Note that a piece is complete."""
        with _writing(self.path):
            fsync_dir(self.path)
        self._put(f"{_JOURNAL}/{piece}.json", facts)

    def finish(self, manifest: Facts) -> None:
        """Write the manifest, forget the records and give the folder its name."""
        self._put(MANIFEST, manifest)
        self._leave()

    def complete(self) -> Facts | None:
        """The manifest, if only the last steps of an equal conversion were missing; they are then made."""
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            return None
        facts = _read_json(manifest)
        self._leave()
        return facts

    def _leave(self) -> None:
        with _writing(self._destination):
            fsync_dir(self.path)
            shutil.rmtree(self._journal)
            os.replace(self.path, self._destination)
            fsync_dir(self._destination.parent)

    def _agree(self) -> None:
        """Write the plan, or see that the one found here is the same."""
        manifest, plan = self.path / MANIFEST, self._journal / "plan.json"
        if manifest.is_file():
            there = _read_json(manifest).get("plan")
        elif plan.is_file():
            there = _read_json(plan)
        else:
            self._put(f"{_JOURNAL}/plan.json", self._plan)
            return
        if there != self._plan:
            raise UsageError(
                f"another conversion to {self._destination} was begun",
                where=str(self.path),
                why="its data or its options were different: " + _difference(there or {}, self._plan),
                then=f"repeat its command, or give it up: rm -r {self.path}",
            )

    def put_text(self, name: str, text: str) -> None:
        """Write a file of the room, whole, and wait until it is on the disk."""
        with self.new_file(name) as file:
            file.write(text.encode())

    def _put(self, name: str, facts: Facts) -> None:
        self.put_text(name, json.dumps(facts, indent=1, sort_keys=True) + "\n")


def _difference(there: Facts, wanted: Facts) -> str:
    keys = sorted(key for key in {*there, *wanted} if there.get(key) != wanted.get(key))
    return ", ".join(keys)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        return facts
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path.name}", where=str(path), why=str(error), then="remove that folder"
        ) from error


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write {path.name}",
            where=error.filename or str(path),
            why=error.strerror or str(error),
            then="free some space or name a folder you may write to; the same command then goes on",
        ) from error
