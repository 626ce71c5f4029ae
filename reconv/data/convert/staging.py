"""The hidden folder beside the destination in which a conversion is made until it is complete.

The destination appears by one rename, complete and with its manifest. A shard counts as done only when its bytes and
its record are on disk. A killed conversion continues if its plan is the same, and is refused otherwise.

Its bytes depend on data and options alone (tests/data/convert/test_convert.py).
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

from reconv.core.errors import DataError, ResourceError, RunLockedError, UsageError
from reconv.core.wait import ProcessWait
from reconv.storage.files import atomic_writer, fsync_dir

MANIFEST = "reconv.json"
_JOURNAL = ".journal"

Facts = Mapping[str, Any]


def finished_conversion(destination: Path, plan: Facts) -> Facts | None:
    """The manifest of a complete conversion with the same plan; None if the destination is free."""
    if not destination.exists():
        return None
    manifest = destination / MANIFEST
    if manifest.is_file():
        facts = _read_json(manifest)
        if facts.get("plan") == plan:
            return facts
        why = "it holds another conversion, of other data or with other options"
    elif destination.is_dir() and not any(destination.iterdir()):
        return None
    else:
        why = "it holds other files, which are never overwritten"
    raise UsageError(f"{destination} already exists", where=str(destination), why=why, hint="choose a new folder")


class StagingDir:
    """An unfinished conversion: its files, and a journal of the shards that are done."""

    def __init__(self, destination: Path, plan: Facts) -> None:
        self._destination = destination
        self._plan = plan
        self.path = destination.with_name(f".{destination.name}.converting")
        self._journal = self.path / _JOURNAL

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Create or reopen the folder and keep other processes out of it."""
        with _write_errors(self.path):
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
                    hint="wait for it, or choose another folder",
                ) from error
            self._check_plan()
            yield

    def record(self, shard: str) -> Facts | None:
        """The facts recorded for a finished shard; None if it is not finished."""
        file = self._journal / f"{shard}.json"
        return _read_json(file) if file.is_file() else None

    def wait_for_record(self, shard: str) -> None:
        """Wait for the record of another machine: a network file system may show it a little later."""
        wait = ProcessWait()
        while self.record(shard) is None:
            wait.tick(
                f"the record of {shard}",
                where=str(self._journal),
                hint="check that all machines see the same folder, then run the same command again",
            )

    @contextmanager
    def new_file(self, name: str) -> Iterator[BinaryIO]:
        """A file that gets its name when the block ends and its bytes are on disk."""
        # In the journal, so that what a killed process leaves behind does not become part of the dataset.
        temporary, final = self._journal / f"{name.replace('/', '-')}.tmp", self.path / name
        with _write_errors(final):
            final.parent.mkdir(parents=True, exist_ok=True)
            with atomic_writer(final, temporary) as file:
                yield file

    def make_folder(self, path: Path) -> None:
        """Create a folder and its parents."""
        with _write_errors(path):
            path.mkdir(parents=True, exist_ok=True)

    def write_unsynced(self, path: Path, data: bytes) -> None:
        """Write a small file of a shard; the writer syncs the shard as a whole."""
        with _write_errors(path):
            path.write_bytes(data)

    def write_text(self, name: str, text: str) -> None:
        """Write a file atomically."""
        with self.new_file(name) as file:
            file.write(text.encode())

    def mark_done(self, shard: str, facts: Facts) -> None:
        """Record that a shard is complete."""
        with _write_errors(self.path):
            fsync_dir(self.path)
        self._write_json(f"{_JOURNAL}/{shard}.json", facts)

    def publish(self, manifest: Facts) -> None:
        """Write the manifest, delete the journal and rename the folder to the destination."""
        self._write_json(MANIFEST, manifest)
        self._rename()

    def publish_if_complete(self) -> Facts | None:
        """Publish a conversion that was killed right after writing its manifest; returns that, or None."""
        manifest = self.path / MANIFEST
        if not manifest.is_file():
            return None
        facts = _read_json(manifest)
        self._rename()
        return facts

    def _rename(self) -> None:
        with _write_errors(self._destination):
            fsync_dir(self.path)
            shutil.rmtree(self._journal)
            os.replace(self.path, self._destination)
            fsync_dir(self._destination.parent)

    def _check_plan(self) -> None:
        """Record the plan, or check that the recorded one is the same."""
        manifest, plan = self.path / MANIFEST, self._journal / "plan.json"
        if manifest.is_file():
            recorded = _read_json(manifest).get("plan")
        elif plan.is_file():
            recorded = _read_json(plan)
        else:
            self._write_json(f"{_JOURNAL}/plan.json", self._plan)
            return
        if recorded != self._plan:
            raise UsageError(
                f"another conversion to {self._destination} is unfinished",
                where=str(self.path),
                why="its data or options differ: " + _difference(recorded or {}, self._plan),
                hint=f"repeat its command, or discard it: rm -r {self.path}",
            )

    def _write_json(self, name: str, facts: Facts) -> None:
        self.write_text(name, json.dumps(facts, indent=1, sort_keys=True) + "\n")


def _difference(recorded: Facts, wanted: Facts) -> str:
    keys = sorted(key for key in {*recorded, *wanted} if recorded.get(key) != wanted.get(key))
    return ", ".join(keys)


def _read_json(path: Path) -> dict[str, Any]:
    try:
        facts: dict[str, Any] = json.loads(path.read_bytes())
        return facts
    except (OSError, ValueError) as error:
        raise DataError(
            f"cannot read {path.name}", where=str(path), why=str(error), hint="delete that folder"
        ) from error


@contextmanager
def _write_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ResourceError(
            f"cannot write {path.name}",
            where=error.filename or str(path),
            why=error.strerror or str(error),
            hint="free some space or choose a writable folder, then run the same command again to continue",
        ) from error
