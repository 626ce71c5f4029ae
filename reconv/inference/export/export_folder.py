"""The folder of an export: made in a hidden folder beside it, and renamed when it is complete and checked."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from reconv.errors import RunLockedError, UsageError
from reconv.io.atomic import disk_errors, fsync_dir, write_atomic

SETTINGS = "preprocess.json"
REPORT = "report.json"


class ExportFolder:
    """The destination of an export. `staging` is where it is made; a killed export leaves that alone behind."""

    def __init__(self, path: Path, *, replace: bool) -> None:
        self.path = path
        self.staging = path.with_name(f".{path.name}.exporting")
        self.refused_report = path.with_name(f"{path.name}.refused.json")
        self._lock = path.with_name(f".{path.name}.exporting.lock")
        if path.exists() and not (replace and (path / SETTINGS).is_file() and (path / REPORT).is_file()):
            is_export = (path / REPORT).is_file()
            raise UsageError(
                f"{path} already exists",
                where=str(path),
                why="it holds an earlier export" if is_export else "it is not an export, and is never overwritten",
                then="replace it: --force" if is_export else "choose another folder: --out DIR",
            )

    @contextmanager
    def staged(self) -> Iterator[Path]:
        """An empty staging folder; what a killed export has left is deleted, and so is this one after an error."""
        with disk_errors(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        with open(self._lock, "wb") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                raise RunLockedError(
                    f"{self.path} is being written by another process",
                    where=str(self.staging),
                    then="wait for it, or choose another folder: --out DIR",
                ) from error
            try:
                with disk_errors(self.path):
                    shutil.rmtree(self.staging, ignore_errors=True)
                    self.staging.mkdir()
                    yield self.staging
            finally:
                shutil.rmtree(self.staging, ignore_errors=True)
                self._lock.unlink(missing_ok=True)

    def publish(self) -> None:
        """Give the staged folder its name; an earlier export is replaced."""
        for file in self.staging.rglob("*"):
            if file.is_file():
                _fsync(file)
        fsync_dir(self.staging)
        old = self.path.with_name(f".{self.path.name}.replaced")
        shutil.rmtree(old, ignore_errors=True)
        if self.path.exists():
            os.replace(self.path, old)
        os.replace(self.staging, self.path)
        fsync_dir(self.path.parent)
        shutil.rmtree(old, ignore_errors=True)
        self.refused_report.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Write a JSON file for people and programs."""
    write_atomic(path, json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n")


def _fsync(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
