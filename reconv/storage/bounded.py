"""Read files that others wrote: regular files only, within a limit, and JSON that is not nested too deeply.

Every failure is an OSError whose `strerror` says what is wrong, or a ValueError for content that is not what it should
be. Nothing waits for a named pipe or reads a device.
"""

from __future__ import annotations

import errno
import io
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

from reconv.storage import read_limits
from reconv.storage.cache import remote_trees
from reconv.storage.transient import naming, retry_transient

_CHUNK_BYTES = 1 << 20
_FILE_TYPES = {
    stat.S_IFIFO: "a named pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}


class NotRegularFileError(OSError):
    """A pipe, socket, device or folder where a regular file should be."""

    def __init__(self, path: str | Path, mode: int) -> None:
        kind = _FILE_TYPES.get(stat.S_IFMT(mode), "something else")
        super().__init__(errno.EINVAL, f"it is {kind}, not a regular file", str(path))


class TooLargeError(OSError):
    """A file above its limit."""

    def __init__(self, path: str | Path, num_bytes: int, max_bytes: int) -> None:
        text = f"it has {num_bytes:,} bytes, and at most {max_bytes:,} are read of such a file"
        super().__init__(errno.EINVAL, text, str(path))  # about the path, not the machine


class NotTextError(OSError):
    """A NUL byte in a text file: it is binary, encoded in UTF-16, or has a hole."""

    def __init__(self, path: str | Path, at: int) -> None:
        super().__init__(errno.EINVAL, f"it is not UTF-8 text: byte {at} is zero", str(path))


def real_path(path: str | Path) -> Path:
    """The absolute path without links; unlike with `Path.resolve`, a link that leads to itself is no error."""
    return Path(os.path.realpath(path))


def open_regular(path: str | Path) -> tuple[int, int]:
    """The descriptor and size of a regular file; O_NONBLOCK, because opening a named pipe would wait for its writer."""
    # A Python file object would release the GIL twice as often.
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except ValueError as error:  # a NUL in the name
        raise OSError(errno.EINVAL, str(error), repr(str(path))) from error
    except OSError as error:
        if error.errno == errno.ENXIO:  # sockets cannot be opened
            raise NotRegularFileError(path, os.stat(path).st_mode) from error
        raise
    try:
        status = os.fstat(descriptor)  # raises for a stale network file
        if not stat.S_ISREG(status.st_mode):
            raise NotRegularFileError(path, status.st_mode)
        if not status.st_mode & 0o777 and os.fspath(path).startswith(remote_trees()):
            raise OSError(errno.EINVAL, "it is in an object store, and only images and shards are read there")
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor, status.st_size


def open_file(path: Path) -> io.BufferedReader:
    """A regular file, opened for reading."""
    descriptor, _ = open_regular(path)
    return os.fdopen(descriptor, "rb")


def check_regular(path: Path) -> None:
    """Raise OSError unless the path is a regular file, before a library opens it."""
    os.close(open_regular(path)[0])


def read_bytes(path: str | Path, max_bytes: int) -> bytes:
    """The content of a regular file."""
    return retry_transient(lambda: _read(path, max_bytes, lambda chunk, at: None), path)


def read_text(path: str | Path, max_bytes: int) -> bytes:
    """The content of a text file, undecoded; stops at a NUL byte, so that a file with a hole takes no memory."""

    def check(chunk: bytes, at: int) -> None:
        if (zero := chunk.find(b"\0")) >= 0:
            raise NotTextError(path, at + zero)

    return retry_transient(lambda: _read(path, max_bytes, check), path)


def _read(path: str | Path, max_bytes: int, check: Callable[[bytes, int], None]) -> bytes:
    with naming(path):
        descriptor, size = open_regular(path)
        try:
            if size > max_bytes:
                raise TooLargeError(path, size, max_bytes)
            chunks: list[bytes] = []
            num_bytes = 0
            # Some file systems report no size before the file is read.
            while chunk := os.read(descriptor, _CHUNK_BYTES):
                check(chunk, num_bytes)
                chunks.append(chunk)
                num_bytes += len(chunk)
                if num_bytes > max_bytes:
                    raise TooLargeError(path, num_bytes, max_bytes)
        finally:
            os.close(descriptor)
    return b"".join(chunks)


def parse_json(data: bytes | str, object_hook: Callable[[dict[str, Any]], Any] | None = None) -> Any:
    """The value in a JSON text; raises ValueError, also for values nested too deeply and numbers that are too long."""
    try:
        return json.loads(data, object_hook=object_hook)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def parse_shallow_json(data: bytes | str) -> Any:
    """The value in a JSON text of at most `read_limits.NESTING` levels."""
    value = parse_json(data)
    level: list[Any] = [value]
    for _ in range(read_limits.NESTING):
        level = [inner for item in level if isinstance(item, dict | list) for inner in _items(item)]
        if not level:
            return value
    raise ValueError(f"nested too deeply: more than {read_limits.NESTING} levels")


def _items(value: dict[str, Any] | list[Any]) -> list[Any]:
    items = value.values() if isinstance(value, dict) else value
    return [item for item in items if isinstance(item, dict | list)]


def read_json_object(path: Path, max_bytes: int) -> dict[str, Any]:
    """The JSON object in a file; raises OSError if it cannot be read, and ValueError if it holds something else."""
    value = parse_shallow_json(read_text(path, max_bytes))
    if not isinstance(value, dict):
        raise ValueError(f"a JSON {type(value).__name__} instead of an object")
    return value
