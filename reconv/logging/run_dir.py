"""The run directory: the paths of its files, the numbering of runs, the lock, and what a killed process left there.

docs/reference/run-directory.md lists the files. Nothing that is written is a pickle (tests/test_source.py).
"""

from __future__ import annotations

import errno
import fcntl
import json
import os
import re
import socket
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType
from typing import Any

from reconv.core.errors import CheckpointError, ResourceError, RunLockedError, UsageError
from reconv.core.message import message
from reconv.recipe.presets import nearest
from reconv.storage import read_limits
from reconv.storage.bounded import NotRegularFileError, NotTextError, TooLargeError, read_json_object
from reconv.storage.files import FileSystem, disk_errors

# What training and evaluation write into a run directory, beside its checkpoints.
RUN_FILES = frozenset(
    """
    run.json recipe.yaml events.jsonl summary.json report.html best.json averaged.safetensors evaluations.csv
    classification.json detection.json confidence.json training.csv validation.csv scalars.csv mlperf.log job.json
    """.split()  # noqa: SIM905
)
RUN_FOLDERS = ("images", "logs", "traces")
_PREDICTIONS = re.compile(r"predictions[\w-]*\.(csv|parquet)")  # of `reconv eval --predictions`
_PLAIN = re.compile(r"[\w ()+,=@-][\w ().+,=@-]*")  # the part of a path: not hidden
_MAX_DEPTH, _MAX_LINKS = 6, 10_000


@message
@dataclass(frozen=True, slots=True)
class RunDir:
    """The directory of one run."""

    path: Path

    @classmethod
    def at(cls, path: Path, files: FileSystem | None = None) -> RunDir:
        """The run directory at a path, created if it does not exist."""
        files = files or FileSystem()
        with disk_errors(path, fs=files):
            files.makedirs(path)
            files.fsync_dir(path.parent)
        return cls(path)

    @classmethod
    def create(cls, root: Path, recipe_name: str, files: FileSystem | None = None) -> RunDir:
        """Create a new run directory `root/recipe_name/n`."""
        if recipe_name in ("", ".", "..") or "/" in recipe_name or "\0" in recipe_name:
            raise UsageError(f"{recipe_name!r} is not a valid name for a run directory", hint="use --out DIR")
        files = files or FileSystem()
        parent = root / recipe_name
        with disk_errors(parent, fs=files):
            files.makedirs(parent)
            while True:
                path = cls.next(root, recipe_name)
                try:
                    files.mkdir(path)
                except FileExistsError:
                    continue  # another process was faster
                files.fsync_dir(parent)
                return cls(path)

    @staticmethod
    def next(root: Path, recipe_name: str) -> Path:
        """The run directory that `create` would make now."""
        return root / recipe_name / str(max(_numbers(root / recipe_name), default=0) + 1)

    @classmethod
    def all(cls, root: Path, recipe_name: str) -> list[RunDir]:
        """The started runs of a recipe, newest first."""
        return runs_in(root / recipe_name)

    @classmethod
    def newest_unfinished(cls, root: Path, recipe_name: str) -> RunDir | None:
        """The newest run of a recipe that was started and has not finished."""
        return next((run for run in cls.all(root, recipe_name) if not run.is_finished()), None)

    @property
    def identity(self) -> Path:
        return self.path / "run.json"

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
        """The average of the last checkpoints, if it was computed."""
        return self.path / "averaged.safetensors"

    @property
    def alive(self) -> Path:
        """Its modification time is that of the last progress of training."""
        return self.path / "alive"

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
        """True if a run was started here."""
        return self.recipe.is_file() or self.checkpoints.is_dir()

    def is_finished(self) -> bool:
        """True if the run has finished: exit code 0, and all steps done or stopped early."""
        try:
            summary = read_json_object(self.summary, read_limits.SUMMARY_BYTES)
        except (FileNotFoundError, NotRegularFileError, TooLargeError, NotTextError, ValueError):
            return False
        if summary.get("exit_code") != 0:
            return False
        if summary.get("stopped_early"):
            return True
        steps, total_steps = summary.get("steps"), summary.get("total_steps")
        if steps is None or total_steps is None:
            return True
        return isinstance(steps, int) and isinstance(total_steps, int) and steps >= total_steps

    def check_links(self) -> None:
        """Raise `CheckpointError` if a link in the directory leads out of it: what is written would be elsewhere."""
        root = os.path.realpath(self.path)
        for path in islice(_links(self.path, _MAX_DEPTH), _MAX_LINKS):
            target = os.path.realpath(path)
            if target != root and not target.startswith(f"{root}{os.sep}"):
                raise CheckpointError(
                    "a link in the run directory leads out of it",
                    where=str(path),
                    why=f"it leads to {target}, which would be read as a part of the run, and written",
                    hint="put the file or folder itself there (cp -rL RUN COPY copies a run without links)",
                )

    def lock(self) -> RunLock:
        """Lock the run directory for this process; raises `RunLockedError` if another process holds the lock."""
        self.check_links()
        return RunLock(self.lock_file)


def is_run_file(name: str) -> bool:
    """True if a run has files of this name, relative to its directory; those of checkpoints are in their manifests."""
    folder, _, file = name.rpartition("/")
    if not folder:
        return file in RUN_FILES or _PREDICTIONS.fullmatch(file) is not None
    return folder.partition("/")[0] in RUN_FOLDERS and all(_PLAIN.fullmatch(part) for part in name.split("/"))


def _links(folder: Path, depth: int) -> Iterator[str]:
    """The links in a folder and, without following any, the folders in it."""
    with suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_symlink():
                yield entry.path
            elif depth > 1 and entry.is_dir(follow_symlinks=False):
                yield from _links(Path(entry.path), depth - 1)


def runs_in(folder: Path) -> list[RunDir]:
    """The started runs in a folder, newest first."""
    runs = (RunDir(folder / str(number)) for number in sorted(_numbers(folder), reverse=True))
    return [run for run in runs if run.is_run()]


def no_such_run(path: Path) -> CheckpointError:
    """The error for a path of a run that does not exist, with the run that was most likely meant."""
    existing = [str(run.path) for recipe in sorted(Path("runs").glob("*/")) for run in runs_in(recipe)]
    like = Path("runs") / path
    close = str(like) if like.exists() else nearest(str(path), existing) or nearest(str(like), existing)
    if close is not None:
        hint = f"did you mean {close}?"
    elif existing:
        hint = f"use one of {', '.join(existing[:3])}{', ...' if len(existing) > 3 else ''}; reconv status lists them"
    else:
        hint = "train first: reconv train quickstart"
    return CheckpointError("no such run", where=str(path), hint=hint)


def check_run_exists(run: str) -> None:
    """Raise if a run, checkpoint or weights file does not exist; addresses and published names are not looked up.

    Commands call this before anything is imported that takes long.
    """
    path = Path(run)
    if ":" not in run and not path.exists() and not path.with_name(f"{path.name}.index").exists():  # TensorFlow's
        raise no_such_run(path)


def _numbers(folder: Path) -> Iterator[int]:
    """The run numbers in a folder; zero-padded names are not ours."""
    if folder.is_dir():
        for name in os.listdir(folder):
            if name.isdecimal() and name == str(int(name)):
                yield int(name)


# A forked child (a data worker) shares the lock and would keep it after its parent's death, so it closes its copy.
_held: set[int] = set()


def _close_in_child() -> None:
    for descriptor in _held:
        os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)


class RunLock:
    """The lock of a run directory, held until it is released or the process ends in whatever way."""

    def __init__(self, path: Path) -> None:
        with disk_errors(path):
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NONBLOCK, 0o644)
        try:
            with disk_errors(path):
                if not stat.S_ISREG(mode := os.fstat(descriptor).st_mode):
                    raise NotRegularFileError(path, mode)
            _lock(descriptor, path)
            with disk_errors(path):
                os.ftruncate(descriptor, 0)
                os.write(descriptor, json.dumps({"pid": os.getpid(), "host": socket.gethostname()}).encode())
        except BaseException:
            os.close(descriptor)
            raise
        self._descriptor: int | None = descriptor
        _held.add(descriptor)

    def release(self) -> None:
        """Release the lock; a second call does nothing."""
        # In a forked child the descriptor is already closed, and its number may belong to another file.
        if self._descriptor is not None and self._descriptor in _held:
            _held.remove(self._descriptor)
            with suppress(OSError):  # of the file's content, which is not needed any more; the lock is released
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
            "the run directory is in use by another process",
            where=str(path.parent),
            why=f"held by {_holder(descriptor)}",
            hint="wait for it or stop it, or use another folder with --out DIR",
        ) from error
    except OSError as error:
        raise ResourceError(
            "the run directory cannot be locked",
            where=str(path),
            why=f"{error.strerror} ({errno.errorcode.get(error.errno or 0, 'unknown error')})",
            hint="use a folder on a file system that supports locks: --out DIR",
        ) from error


def _holder(descriptor: int) -> str:
    """The process that holds the lock, as written by itself; it may not have finished writing."""
    try:
        holder = json.loads(os.pread(descriptor, 4096, 0))
        return f"process {holder['pid']} on {holder['host']}"
    except (ValueError, KeyError, TypeError):
        return "a process that has just started"


def read_summary(run_dir: Path) -> dict[str, Any]:
    """The content of a run's `summary.json`."""
    return read_json_object(run_dir / "summary.json", read_limits.SUMMARY_BYTES)
