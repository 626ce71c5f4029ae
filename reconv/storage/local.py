"""Read data files: ranges of bytes, copied or memory-mapped, and listings of folders.

Files of object stores are read through `remote_tree`, by the same functions.

All readers go through this module. The requested bytes come back complete, or a `DataError` names the file; special
files such as named pipes are never waited for, unless the user named them. Only the compiled decoder opens image files
itself; those it cannot read are read here.
"""

from __future__ import annotations

import errno
import io
import mmap
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Protocol

from reconv.storage import bounded, read_limits
from reconv.storage.data_errors import truncated, unreadable
from reconv.storage.mounts import is_local
from reconv.storage.remote_tree import RemoteFile, remote_file
from reconv.storage.transient import retry_transient

_CHUNK_BYTES = 2**20
_MAX_PATH_BYTES = 4095  # of Linux


class ByteRanges(Protocol):
    """Random access to the bytes of one file, from any thread."""

    is_mapped: bool
    size_bytes: int

    def read(self, start: int, length: int) -> memoryview:
        """Exactly `length` bytes from `start`."""
        ...

    def check_not_truncated(self) -> None:
        """Raise if the file is shorter than when it was opened: access to missing mapped bytes is fatal."""
        ...


class MappedFile:
    """A memory-mapped file: shared by all processes through the page cache, never copied."""

    is_mapped = True

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            descriptor, _ = bounded.open_regular(path)
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

    def __reduce__(self) -> tuple[type[MappedFile], tuple[Path]]:
        """Another process maps the file again."""
        return MappedFile, (self._path,)

    def read(self, start: int, length: int) -> memoryview:
        """A view of the mapped bytes."""
        if start < 0 or length < 0 or start + length > self.size_bytes:
            raise truncated(self._path, max(0, self.size_bytes - start), length, start)
        return self._view[start : start + length]

    def check_not_truncated(self) -> None:
        """Compare the file's current size, which takes 1 us; a truncation right after that is not noticed."""
        if self._map is not None and (size := self._map.size()) < self.size_bytes:
            raise truncated(self._path, size, self.size_bytes, 0)


class StoredObject:
    """A file of an object store, read by ranges through the cache."""

    is_mapped = False

    def __init__(self, file: RemoteFile) -> None:
        self._file = file
        self.size_bytes = file.size_bytes

    def read(self, start: int, length: int) -> memoryview:
        """A view of the cache, or a copy of the bytes."""
        if start < 0 or length < 0 or start + length > self.size_bytes:
            raise truncated(self._file.path, max(0, self.size_bytes - start), length, start)
        try:
            return self._file.read(start, length)
        except OSError as error:
            raise unreadable(self._file.path, error) from error

    def check_not_truncated(self) -> None:
        """Nothing to do: a read raises."""


class UnmappedFile:
    """A file that is opened for every read."""

    is_mapped = False

    def __init__(self, path: Path) -> None:
        self._path = path
        self.size_bytes = size_bytes(path)

    def read(self, start: int, length: int) -> memoryview:
        """A copy of the bytes."""
        return memoryview(read(self._path, start, length))

    def check_not_truncated(self) -> None:
        """Nothing to do: a read raises."""


def open_ranges(path: Path) -> ByteRanges:
    """The file, memory-mapped if it is on a local disk."""
    file = remote_file(path)
    if file is not None:
        return StoredObject(file)
    return MappedFile(path) if is_local(path) else UnmappedFile(path)


def read(
    path: str | Path, start: int = 0, length: int | None = None, max_bytes: int = read_limits.IMAGE_BYTES
) -> bytes:
    """The file's bytes from `start`, `length` of them or all to the end; more than `max_bytes` are refused."""
    try:
        file = remote_file(path)
        if file is not None:
            data = _read_remote(file, start, length, max_bytes)
        else:
            data = retry_transient(lambda: _read(path, start, length, max_bytes), path)
    except OSError as error:
        raise unreadable(path, error) from error
    if length is not None and len(data) < length:
        raise truncated(path, len(data), length, start)
    return data


def _read_remote(file: RemoteFile, start: int, length: int | None, max_bytes: int) -> bytes:
    left = max(0, file.size_bytes - start)
    wanted = left if length is None else min(length, left)
    if wanted > max_bytes:
        raise bounded.TooLargeError(file.path, wanted, max_bytes)
    return bytes(file.read(start, wanted))


def _read(path: str | Path, start: int, length: int | None, max_bytes: int) -> bytes:
    descriptor, size = bounded.open_regular(path)
    try:
        if (wanted := size - start if length is None else min(length, size)) > max_bytes:
            raise bounded.TooLargeError(path, wanted, max_bytes)
        if start:
            os.lseek(descriptor, min(start, size), os.SEEK_SET)
        if length is None and size == 0:  # some file systems report no size before the file is read
            return _read_to_end(descriptor, path, max_bytes)
        # Never allocate more than the file has, whatever a damaged index asks for.
        return _read_exactly(descriptor, size - start if length is None else min(length, size or length))
    finally:
        os.close(descriptor)


def read_bounded_text(path: str | Path, max_bytes: int) -> bytes:
    """The bytes of a text file, undecoded; a file with more than `max_bytes` or with a NUL byte is refused."""
    try:
        return bounded.read_text(path, max_bytes)
    except OSError as error:
        raise unreadable(path, error) from error


def read_file_or_pipe(path: str | Path) -> bytes:
    """All bytes of a file or named pipe that the user gave; waits for the writer of a pipe."""
    try:
        if not stat.S_ISFIFO(os.stat(path).st_mode):
            return read(path)
        with open(path, "rb", buffering=0) as pipe:
            return _read_to_end(pipe.fileno(), path, read_limits.IMAGE_BYTES)
    except OSError as error:
        raise unreadable(path, error) from error


def size_bytes(path: str | Path) -> int:
    """The file's size."""
    try:
        status = os.stat(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        raise unreadable(path, error if isinstance(error, OSError) else OSError(errno.EINVAL, str(error))) from error
    if not stat.S_ISREG(status.st_mode):
        raise unreadable(path, bounded.NotRegularFileError(path, status.st_mode))
    return status.st_size


class ReadWindow:
    """Buffered forward reading: small reads within the last chunk cost no system call."""

    def __init__(self, path: str | Path, chunk_bytes: int = 4096) -> None:
        self.path = path
        self._chunk_bytes = chunk_bytes
        self._size = size_bytes(path)
        self._start = 0
        self._chunk = b""

    def read(self, start: int, length: int) -> bytes:
        """Exactly `length` bytes from `start`."""
        at = start - self._start
        if at < 0 or at + length > len(self._chunk):
            ahead = min(self._chunk_bytes, self._size - start)
            self._start, self._chunk, at = start, read(self.path, start, max(length, ahead)), 0
        return self._chunk[at : at + length]


class ReadStream(io.RawIOBase):
    """A readable, seekable file object for libraries such as tarfile."""

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
        data = self._window.read(self._at, left if size < 0 else min(size, left))
        self._at += len(data)
        return data


def is_possible_path(path: str) -> bool:
    """True if a text from a file can be a path at all."""
    try:
        return "\0" not in path and 0 < len(os.fsencode(path)) <= _MAX_PATH_BYTES
    except UnicodeEncodeError:  # a lone surrogate
        return False


def is_folder(entry: os.DirEntry[str]) -> bool:
    """True if an entry is a folder or a link to one; a link to itself is neither folder nor file."""
    return _follow(entry.is_dir)


def is_regular_file(entry: os.DirEntry[str]) -> bool:
    """True if an entry is a regular file or a link to one."""
    return _follow(entry.is_file)


def _follow(test: Callable[[], bool]) -> bool:
    try:
        return test()
    except OSError as error:
        # A link to itself, or one that may not be followed, as in the /proc of another user.
        if error.errno in (errno.ELOOP, errno.EACCES, errno.EPERM):
            return False
        raise


def listing(folder: str | Path) -> tuple[list[str], list[str]]:
    """The sorted names of the files and of the folders in a folder, without hidden ones."""
    files: list[str] = []
    folders: list[str] = []
    try:
        with os.scandir(folder) as entries:
            for entry in entries:
                if not entry.name.startswith("."):
                    (folders if is_folder(entry) else files).append(entry.name)
    except OSError as error:
        raise unreadable(folder, error) from error
    return sorted(files), sorted(folders)


def _read_to_end(descriptor: int, path: str | Path, max_bytes: int) -> bytes:
    chunks: list[bytes] = []
    num_bytes = 0
    while chunk := os.read(descriptor, _CHUNK_BYTES):
        chunks.append(chunk)
        num_bytes += len(chunk)
        if num_bytes > max_bytes:
            raise bounded.TooLargeError(path, num_bytes, max_bytes)
    return b"".join(chunks)


def _read_exactly(descriptor: int, length: int) -> bytes:
    chunks: list[bytes] = []
    while length > 0 and (chunk := os.read(descriptor, length)):
        chunks.append(chunk)
        length -= len(chunk)
    return b"".join(chunks)
