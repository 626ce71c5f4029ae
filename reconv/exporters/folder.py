"""The folder of an export: made in a hidden folder beside it, and renamed when it is complete and checked.

It is called `.NAME.exporting` until then. An export that differs from the trained network leaves `NAME.refused.json`
alone and exit code 9 (tests/inference/export).
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reconv.core.errors import RunLockedError, UsageError
from reconv.storage.files import disk_errors, fsync_dir, write_atomic

SETTINGS = "preprocess.json"
REPORT = "report.json"


class ExportFolder:
    """The destination of an export. `staging` is where it is made; a killed export leaves that alone behind."""

    def __init__(self, path: Path, *, replace: bool) -> None:
        path = path if path.name and path.name != ".." else Path(os.path.abspath(path))
        self.path = path
        self.staging = path.with_name(f".{path.name}.exporting")
        self.refused_report = path.with_name(f"{path.name}.refused.json")
        self._replaced = path.with_name(f".{path.name}.replaced")
        is_export = (path / SETTINGS).is_file() and (path / REPORT).is_file()
        if path.exists() and not (replace and is_export):
            raise UsageError(
                f"{path} already exists",
                where=str(path),
                why="it holds an earlier export" if is_export else "it is not an export, and is never overwritten",
                hint="replace it: --force" if is_export else "choose another folder: --out DIR",
            )

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """An empty staging folder; what a killed export has left is deleted, and so is this one after an error."""
        with disk_errors(self.path):
            self.staging.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.staging, os.O_RDONLY | os.O_DIRECTORY)
        try:
            self._lock(descriptor)
            with disk_errors(self.path):
                if self._replaced.exists() and not self.path.exists():  # killed between the two renames of `publish`
                    os.replace(self._replaced, self.path)
                _empty(self.staging)
            try:
                yield self.staging
            finally:
                shutil.rmtree(self.staging, ignore_errors=True)
        finally:
            os.close(descriptor)

    def publish(self) -> None:
        """Give the staged folder its name; an earlier export is replaced."""
        with disk_errors(self.path):
            for file in self.staging.rglob("*"):
                if file.is_file():
                    _fsync(file)
            fsync_dir(self.staging)
            shutil.rmtree(self._replaced, ignore_errors=True)
            if self.path.exists():
                os.replace(self.path, self._replaced)
            os.replace(self.staging, self.path)
            fsync_dir(self.path.parent)
            shutil.rmtree(self._replaced, ignore_errors=True)
            self.refused_report.unlink(missing_ok=True)

    def _lock(self, descriptor: int) -> None:
        """Keep other processes out of the staging folder while it is open."""
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise RunLockedError(
                f"{self.path} is being written by another process",
                where=str(self.staging),
                hint="wait for it, or choose another folder: --out DIR",
            ) from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people and programs."""
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _empty(folder: Path) -> None:
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()


def _fsync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
