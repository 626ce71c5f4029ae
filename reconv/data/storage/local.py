"""The one place where data files are read: a range of bytes of a file, copied or mapped.

Owns opening, reading, listing, mapping and the error for what cannot be read. Refuses to know formats. Invariant: the
bytes asked for come back whole, or a `DataError` names the file; what is no plain file is never waited for, unless a
person named it. The compiled decoder reads image files of a task by itself (`native_rows`), and what it cannot read is
read here.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import re
import stat
from pathlib import Path
from typing import Protocol

from reconv.errors import DataError

# A mapped file that is cut or lost on a server kills the process by SIGBUS; a read of it is an error one can name.
_REMOTE = ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "gfs", "glusterfs", "gpfs", "lustre", "nfs", "smb", "wekafs")
_MOUNTS = Path("/proc/self/mountinfo")
_PIECE_BYTES = 2**20  # of a file that does not tell its size
_NO_FILES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class Ranges(Protocol):
    """Ranges of bytes of one file, from any thread."""

    is_mapped: bool
    size_bytes: int

    def take(self, start: int, length: int) -> memoryview:
        """The bytes from `start`, all of them."""
        ...

    def refuse_if_cut(self) -> None:
        """Raise if the file is shorter than it was: a look at mapped bytes that are gone kills the process."""
        ...


class Mapped:
    """A file in the page cache, shared by every process that maps it; nothing is copied."""

    is_mapped = True

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor, _ = _open_file(path)
            try:
                self._map: mmap.mmap | None = mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
            finally:
                os.close(descriptor)
            self._view = memoryview(self._map)
        except OSError as error:
            raise unreadable(path, error) from error
        except ValueError:  # an empty file cannot be mapped
            self._map, self._view = None, memoryview(b"")
        self.size_bytes = len(self._view)

    def __reduce__(self) -> tuple[type[Mapped], tuple[Path]]:
        """In another process the file is mapped again."""
        return Mapped, (self._path,)

    def take(self, start: int, length: int) -> memoryview:
        """A view of the mapped bytes."""
        if start < 0 or length < 0 or start + length > self.size_bytes:
            raise _ends_early(self._path, max(0, self.size_bytes - start), length, start)
        return self._view[start : start + length]

    def refuse_if_cut(self) -> None:
        """Ask for the size of the file that is mapped, 1 us; between that and the look it is left to luck."""
        if self._map is not None and (there := self._map.size()) < self.size_bytes:
            raise _ends_early(self._path, there, self.size_bytes, 0)


class Unmapped:
    """A file that is opened and read for every range."""

    is_mapped = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = size_bytes(path)

    def take(self, start: int, length: int) -> memoryview:
        """A copy of the bytes."""
        return memoryview(read(self._path, start, length))

    def refuse_if_cut(self) -> None:
        """A read says so itself."""


def open_ranges(path: Path) -> Ranges:
    """The file mapped where it is local, else read range by range."""
    return Mapped(path) if is_local(path) else Unmapped(path)


def is_local(path: Path, mounts: Path = _MOUNTS) -> bool:
    """Whether the file lies on a disk of this machine, as the table of mounts says; without a table: yes."""
    try:
        lines = mounts.read_text(encoding="utf-8", errors="surrogateescape").splitlines()
    except OSError:
        return True
    found = Path(os.path.abspath(path)).resolve()
    longest, kind = -1, ""
    for line in lines:
        before, _, after = line.partition(" - ")
        # Blanks and backslashes are written in octal.
        point = Path(re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), before.split()[4]))
        # The last mount on a point hides the ones before it.
        if (found == point or point in found.parents) and len(point.parts) >= longest:
            longest, kind = len(point.parts), after.split()[0]
    return not kind.startswith(_REMOTE)


def read(path: str | Path, start: int = 0, length: int | None = None) -> bytes:
    """The file's bytes from `start`, `length` of them or all to the end."""
    try:
        descriptor, size = _open_file(path)
        try:
            if start:
                os.lseek(descriptor, start, os.SEEK_SET)
            if length is None and size == 0:  # some systems do not tell it before they are asked for the bytes
                data = _read_to_end(descriptor)
            else:  # room is made for what is there, whatever a broken index asks for
                data = _read_exactly(descriptor, size - start if length is None else min(length, size or length))
        finally:
            os.close(descriptor)
    except OSError as error:
        raise unreadable(path, error) from error
    if length is not None and len(data) < length:
        raise _ends_early(path, len(data), length, start)
    return data


def read_named(path: str | Path) -> bytes:
    """All bytes of a file or a pipe that a person has named: whoever writes into the pipe is waited for."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return read(path)
        with open(path, "rb", buffering=0) as pipe:
            return _read_to_end(pipe.fileno())
    except OSError as error:
        raise unreadable(path, error) from error


def size_bytes(path: str | Path) -> int:
    """The file's size."""
    try:
        status = os.stat(path)
    except OSError as error:
        raise unreadable(path, error) from error
    if not stat.S_ISREG(status.st_mode):
        raise _no_file(path, status.st_mode)
    return status.st_size


class ReadWindow:
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


class Stream(io.RawIOBase):
    """A file's bytes for libraries that want an open file to read and seek in."""

    def __init__(self, path: str | Path) -> None:
        self._window = ReadWindow(path)
        self._size = size_bytes(path)
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._size}[whence]
        self._at = start + offset
        return self._at

    def tell(self) -> int:
        return self._at

    def read(self, size: int = -1) -> bytes:
        left = max(0, self._size - self._at)
        data = self._window.take(self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


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
    then = "check that it exists, is readable by you and is not being moved"
    if error.errno == errno.EMFILE:
        then = "allow more open files: ulimit -n 8192"
    return DataError(f"cannot read {path}", where=str(path), why=error.strerror or str(error), then=then)


def _open_file(path: str | Path) -> tuple[int, int]:
    """A descriptor of a plain file and its size; opening a named pipe the usual way would wait for its writer."""
    # A file object would let go of the GIL twice as often.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        if error.errno == errno.ENXIO:  # sockets cannot be opened
            raise _no_file(path, os.stat(path).st_mode) from error
        raise
    try:
        status = os.fstat(descriptor)  # of a file whose server has forgotten it, an error
        if not stat.S_ISREG(status.st_mode):
            raise _no_file(path, status.st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def _no_file(path: str | Path, mode: int) -> DataError:
    return DataError(
        f"cannot read {path}",
        where=str(path),
        why=f"it is {_NO_FILES.get(stat.S_IFMT(mode), 'something else')}, not a file",
        then="put the file there that it stands for, or remove it",
    )


def _ends_early(path: str | Path, there: int, length: int, start: int) -> DataError:
    return DataError(
        f"file ends early: {there} of {length} bytes from offset {start}",
        where=str(path),
        why="the file is half-written or was cut while being copied",
        then="copy or download it again",
    )


def _read_to_end(descriptor: int) -> bytes:
    return b"".join(iter(lambda: os.read(descriptor, _PIECE_BYTES), b""))


def _read_exactly(descriptor: int, length: int) -> bytes:
    pieces: list[bytes] = []
    while length > 0 and (piece := os.read(descriptor, length)):
        pieces.append(piece)
        length -= len(piece)
    return b"".join(pieces)
