"""Every change to the disk, one method each, and the words for when the disk says no.

Owns the system calls and their translation into errors for people. Refuses to know what is written. Invariant: a
file or folder made by this room appears under its final name only complete and synced.
"""

from __future__ import annotations

import errno
import io
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from reconv.errors import ResourceError
from reconv.io import sync as disk

_CHUNK_BYTES = 8 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_FORBIDDEN = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_IN_THE_WAY = frozenset({errno.EEXIST, errno.ENOTDIR})
_INSTEAD = "choose another folder with --out DIR"


class Files:
    """The file operations of this room; a subclass can make any one of them fail."""

    def make_folder(self, path: Path) -> None:
        """Make a folder and its parents; one that exists is fine."""
        path.mkdir(parents=True, exist_ok=True)

    def claim_folder(self, path: Path) -> None:
        """Make a folder that nobody else has made."""
        path.mkdir()

    def create(self, path: Path) -> io.FileIO:
        """Open a file for writing, unbuffered, so that each write is one system call."""
        return io.FileIO(path, "w")

    def write(self, file: io.FileIO, data: memoryview) -> int:
        """Write some of the data and say how much."""
        return file.write(data) or 0

    def sync(self, file: io.FileIO) -> None:
        """Wait until the file's data is on the disk."""
        os.fsync(file.fileno())

    def sync_folder(self, path: Path) -> None:
        """Wait until the folder's names are on the disk."""
        disk.sync_folder(path)

    def rename(self, source: Path, target: Path) -> None:
        """Move within one file system, atomically; an existing file is replaced."""
        os.replace(source, target)

    def remove_tree(self, path: Path) -> None:
        """Delete a folder and all in it."""
        shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        """Space left for this user on the file system of an existing path."""
        return shutil.disk_usage(path).free

    def open(self, path: Path) -> io.BufferedReader:
        """Open a file for reading."""
        return path.open("rb")

    def names(self, path: Path) -> list[str]:
        """The names in a folder, sorted."""
        return sorted(os.listdir(path))


def write_new(files: Files, path: Path, data: bytes) -> None:
    """Write a file and wait until it is on the disk."""
    with files.create(path) as file:
        rest = memoryview(data)
        while rest:
            rest = rest[files.write(file, rest[:_CHUNK_BYTES]) :]
        files.sync(file)


def replace_file(path: Path, data: bytes, files: Files | None = None) -> None:
    """Put a whole file in the place of another: after a crash it is the old one or the new one."""
    files = files or Files()
    temporary = path.with_name(f".tmp-{path.name}-{os.getpid()}")
    with writing(files, path):
        write_new(files, temporary, data)
        files.rename(temporary, path)
        files.sync_folder(path.parent)


@contextmanager
def writing(files: Files, path: Path, instead: str = _INSTEAD) -> Iterator[None]:
    """Turn the operating system's refusals in the block into errors for people, who may do something else instead."""
    try:
        yield
    except OSError as error:
        raise cannot_write(files, path, error, instead) from error


def cannot_write(files: Files, path: Path, error: OSError, instead: str = _INSTEAD) -> ResourceError:
    """The error for a refused write: which path, how much space is left, what to do."""
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        kind = "the disk quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return disk_full(files, path, kind)
    if error.errno in _FORBIDDEN:
        return ResourceError(
            "unwritable folder",
            where=str(path),
            why=f"the system says: {reason}",
            then=f"ls -ld '{path if os.path.isdir(path) else path.parent}', or {instead}",
        )
    if error.errno in _IN_THE_WAY:
        in_the_way = next((place for place in (path, *path.parents) if os.path.isfile(place)), path)
        return ResourceError(
            "a file is where a folder should be",
            where=str(in_the_way),
            why=f"the folder would be {path}",
            then=f"{instead}, or move the file away",
        )
    return ResourceError(
        "could not write",
        where=str(path),
        why=f"the system says: {reason} ({errno.errorcode.get(error.errno or 0, 'no code')})",
        then=f"check the disk (dmesg, mount), or {instead}",
    )


def disk_full(files: Files, path: Path, what: str, num_bytes: int | None = None) -> ResourceError:
    """The error for a lack of space, with what is left and, where known, what is needed."""
    needed = "" if num_bytes is None else f"{_megabytes(num_bytes)} needed, "
    return ResourceError(
        what,
        where=str(path),
        why=f"{needed}{_free_text(files, path)} free",
        then="make room (or set save.keep_last lower), then the same command with --resume",
    )


def _free_text(files: Files, path: Path) -> str:
    existing = next((p for p in (path, *path.parents) if p.exists()), None)
    if existing is None:
        return "unknown"
    try:
        return _megabytes(files.free_bytes(existing))
    except OSError as error:
        return f"unknown ({error.strerror})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
