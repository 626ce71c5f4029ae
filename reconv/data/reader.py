"""The one place where data files are read: a range of bytes of a file.

Owns opening, reading, listing and the error for what cannot be read. Refuses to know formats. Invariant: the bytes
asked for come back whole, or a `DataError` names the file.
"""

from __future__ import annotations

import os
from pathlib import Path

from reconv.errors import DataError


def read(path: str | Path, start: int = 0, length: int | None = None) -> bytes:
    """The file's bytes from `start`, `length` of them or all to the end."""
    try:
        with open(path, "rb", buffering=0 if length is not None else -1) as file:
            if start:
                file.seek(start)
            data: bytes = file.read() if length is None else _read_exactly(file.fileno(), length)
    except OSError as error:
        raise unreadable(path, error) from error
    if length is not None and len(data) < length:
        raise DataError(
            f"file ends early: {len(data)} of {length} bytes from offset {start}",
            where=str(path),
            why="the file is half-written or was cut while being copied",
            then="copy or download it again",
        )
    return data


def size_bytes(path: str | Path) -> int:
    """The file's size."""
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise unreadable(path, error) from error


class Window:
    """A file read forwards in pieces, for walking through it: what was read last is not read again."""

    def __init__(self, path: str | Path, piece_bytes: int = 4096) -> None:
        self.path = path
        self._piece_bytes = piece_bytes
        self._size = size_bytes(path)
        self._start = 0
        self._piece = b""

    def take(self, start: int, length: int) -> bytes:
        """Exactly these bytes."""
        at = start - self._start
        if at < 0 or at + length > len(self._piece):
            ahead = min(self._piece_bytes, self._size - start)
            self._start, self._piece, at = start, read(self.path, start, max(length, ahead)), 0
        return self._piece[at : at + length]


def listing(folder: str | Path) -> tuple[list[str], list[str]]:
    """Names of the files and of the folders in a folder, each sorted; hidden ones are left out."""
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if entry.is_dir() else files).append(entry.name)
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(files), sorted(folders)


def unreadable(path: str | Path, error: OSError) -> DataError:
    """The error for a file or folder the system would not let us read."""
    return DataError(
        f"cannot read {path}",
        where=str(path),
        why=error.strerror or str(error),
        then="check that it exists, is readable by you and is not being moved",
    )


def _read_exactly(descriptor: int, length: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0 and (piece := os.read(descriptor, length)):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
