"""The run folder: which file is where, whose it is, and whether the run is done.

Owns the names in a run folder, its numbering, its lock and `best.json`. Refuses to know what the files of other
rooms say, beyond the exit code in `summary.json`. Invariant: one process at a time holds the lock, and the lock dies
with that process, however it dies.
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import socket
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from reconv.checkpoint.manifest import damaged
from reconv.errors import ResourceError, RunLockedError, UsageError
from reconv.io.atomic import FileSystem, disk_errors, write_atomic


@dataclass(frozen=True, slots=True)
class BestCheckpoint:
    """The best evaluation so far that has a checkpoint."""

    step: int
    metric: str
    value: float
    weights: str  # raw or ema


@dataclass(frozen=True, slots=True)
class RunDir:
    """The folder of one run, by its contract."""

    path: Path

    @classmethod
    def at(cls, path: Path, files: FileSystem | None = None) -> RunDir:
        """The run folder at a path, made if it is not there."""
        files = files or FileSystem()
        with disk_errors(path, fs=files):
            files.makedirs(path)
            files.fsync_dir(path.parent)
        return cls(path)

    @classmethod
    def create(cls, root: Path, recipe_name: str, files: FileSystem | None = None) -> RunDir:
        """A new run folder `root/recipe_name/n`, which no other process has been given."""
        if recipe_name in ("", ".", "..") or "/" in recipe_name or "\0" in recipe_name:
            raise UsageError(f"{recipe_name!r} cannot name a run folder", then="use --out DIR")
        files = files or FileSystem()
        parent = root / recipe_name
        with disk_errors(parent, fs=files):
            files.makedirs(parent)
            while True:
                number = max(_numbers(parent), default=0) + 1
                try:
                    files.mkdir(parent / str(number))
                except FileExistsError:
                    continue  # another process was faster: the next number is ours
                files.fsync_dir(parent)
                return cls(parent / str(number))

    @classmethod
    def all(cls, root: Path, recipe_name: str) -> list[RunDir]:
        """The runs of a recipe that have begun, newest first."""
        return runs_in(root / recipe_name)

    @classmethod
    def newest_unfinished(cls, root: Path, recipe_name: str) -> RunDir | None:
        """The newest run of a recipe that was begun and is not finished."""
        return next((run for run in cls.all(root, recipe_name) if not run.is_finished()), None)

    @property
    def recipe(self) -> Path:
        return self.path / "recipe.yaml"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def summary(self) -> Path:
        return self.path / "summary.json"

    @property
    def report(self) -> Path:
        return self.path / "report.html"

    @property
    def best(self) -> Path:
        return self.path / "best.json"

    @property
    def averaged(self) -> Path:
        """The average of the last checkpoints, where one was made."""
        return self.path / "averaged.safetensors"

    @property
    def images(self) -> Path:
        return self.path / "images"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def lock_file(self) -> Path:
        return self.path / "lock"

    def is_run(self) -> bool:
        """Whether a run was begun here."""
        return self.recipe.is_file() or self.checkpoints.is_dir()

    def is_finished(self) -> bool:
        """Whether the run reached its end: `summary.json` has exit code 0, and all steps done or a reason why not."""
        try:
            summary: Any = json.loads(self.summary.read_bytes())
        except (FileNotFoundError, ValueError):
            return False
        if not isinstance(summary, dict) or summary.get("exit_code") != 0:
            return False
        if summary.get("stopped_early"):
            return True
        steps, total_steps = summary.get("steps"), summary.get("total_steps")
        return steps is None or total_steps is None or int(steps) >= int(total_steps)

    def lock(self) -> RunLock:
        """Take the run folder for this process; raises `RunLockedError` when another one has it."""
        return RunLock(self.lock_file)

    def read_best(self) -> BestCheckpoint | None:
        """The best evaluation on record, if any."""
        try:
            content = json.loads(self.best.read_bytes())
            return BestCheckpoint(
                int(content["step"]), str(content["metric"]), float(content["value"]), str(content["weights"])
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError) as error:
            raise damaged(self.best, f"is damaged: {type(error).__name__}: {error}") from error

    def write_best(self, best: BestCheckpoint, files: FileSystem | None = None) -> None:
        """Put a new best on record, atomically."""
        with disk_errors(self.best, fs=files):
            write_atomic(self.best, json.dumps(asdict(best)), files)


def runs_in(folder: Path) -> list[RunDir]:
    """The numbered runs in a folder that have begun, newest first."""
    runs = (RunDir(folder / str(number)) for number in sorted(_numbers(folder), reverse=True))
    return [run for run in runs if run.is_run()]


def _numbers(folder: Path) -> Iterator[int]:
    """The run numbers in a folder; a zero-padded name is somebody else's."""
    if folder.is_dir():
        for name in os.listdir(folder):
            if name.isdecimal() and name == str(int(name)):
                yield int(name)


# A forked child (a data worker) would share the lock and keep it beyond its parent's death, so it closes its copy.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """A run folder held by this process until released, or until the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            _lock(descriptor, path)
            os.ftruncate(descriptor, 0)
            os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Give the run folder back; a second time does nothing."""
        # In a forked child the descriptor is closed already and its number may belong to another file.
        if self._descriptor is not None and self._descriptor in _held:
            _held.remove(self._descriptor)
            os.close(self._descriptor)
        self._descriptor = None

    def __enter__(self) -> RunLock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def _lock(descriptor: int, path: Path) -> None:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise RunLockedError(
            "the run folder is in use by another process",
            where=str(path.parent),
            why=f"held by {_holder(descriptor)}",
            then="wait for it or stop it, or train into another folder with --out DIR",
        ) from error
    except OSError as error:
        raise ResourceError(
            "the run folder cannot be locked",
            where=str(path),
            why=f"the system says: {error.strerror} ({errno.errorcode.get(error.errno or 0, 'no code')})",
            then="choose a folder on a file system with locks: --out DIR",
        ) from error


def _holder(descriptor: int) -> str:
    """Who holds the lock, as that process wrote it; it may be in the middle of writing."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has not said its name yet"
