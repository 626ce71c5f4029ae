"""Files that appear under their name only when they are complete and on disk, and errors for a disk that refuses.

A start deletes the temporary files of killed processes; a writer whose file was taken for one writes it again. Whole
writes that may work a moment later are repeated; an fsync never is (tests/faults/test_refused_writes.py).
"""

from __future__ import annotations

import errno
import io
import os
import re
import shutil
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from reconv.core.errors import ReconvError, ResourceError, UsageError
from reconv.storage.bounded import open_file
from reconv.storage.transient import naming, retry_transient

_CHUNK_BYTES = 8 << 20
_DISK_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_NOT_PERMITTED = frozenset({errno.EACCES, errno.EPERM, errno.EROFS})
_TOO_MANY_FILES = frozenset({errno.EMFILE, errno.ENFILE})
_NOT_A_FOLDER = frozenset({errno.EEXIST, errno.ENOTDIR})
_TEMPORARY = re.compile(r"\..+\.[0-9a-f]{12}\.tmp")
_BAD_NAMES = {
    errno.ENAMETOOLONG: "a file name may have 255 bytes, a path 4,095",
    errno.ELOOP: "it is a symbolic link that leads to itself",
}
_MAX_NAME = 100  # characters that are printed
_OTHER_FOLDER = "choose another folder with --out DIR"


class FileSystem:
    """The file operations used for durable writes; tests override single ones to make them fail."""

    def makedirs(self, path: Path) -> None:
        """Create a folder and its parents; it may exist."""
        path.mkdir(parents=True, exist_ok=True)

    def mkdir(self, path: Path) -> None:
        """Create a folder that must not exist."""
        path.mkdir()

    def create(self, path: Path) -> io.FileIO:
        """Open a file for writing, unbuffered: each write is one system call."""
        return io.FileIO(path, "w")

    def write(self, file: io.FileIO, data: memoryview) -> int:
        """Write some of the data; return how many bytes."""
        return file.write(data) or 0

    def fsync(self, file: io.FileIO) -> None:
        """Wait until the file's data is on disk."""
        os.fsync(file.fileno())

    def fsync_dir(self, path: Path) -> None:
        """Wait until the folder's entries are on disk."""
        fsync_dir(path)

    def replace(self, source: Path, target: Path) -> None:
        """Rename within one file system, atomically; an existing file is replaced."""
        os.replace(source, target)

    def remove(self, path: Path) -> None:
        """Delete a file."""
        path.unlink()

    def rmtree(self, path: Path) -> None:
        """Delete a folder with its content."""
        shutil.rmtree(path)

    def free_bytes(self, path: Path) -> int:
        """Space left for this user on the file system of an existing path."""
        return shutil.disk_usage(path).free

    def open(self, path: Path) -> io.BufferedReader:
        """Open a regular file for reading."""
        return open_file(path)

    def listdir(self, path: Path) -> list[str]:
        """The sorted names in a folder."""
        return sorted(os.listdir(path))


def without_links(path: str, flags: int) -> int:
    """An opener for `open` that fails where the path is a link, which would lead to another file, or a pipe."""
    return os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, 0o666)


def fsync_dir(path: Path) -> None:
    """Wait until a folder's entries are on disk, so that a rename survives a power cut."""
    with naming(path):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        except OSError as error:
            # Some network file systems cannot sync a folder and return EINVAL; their renames are synchronous.
            if error.errno != errno.EINVAL:
                raise
        finally:
            os.close(descriptor)


def write_atomic(path: Path, content: bytes | memoryview | str, fs: FileSystem | None = None) -> None:
    """Create or replace a file: readers, and a crash at any moment, see the old content or the new one.

    Text is written as UTF-8. Bytes of file names that are not UTF-8 are escaped; JSON reads the escapes back as they
    were. Errors of a network disk that may pass are waited for. Raises OSError and leaves no temporary file.
    """
    data = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    fs = fs or FileSystem()

    def write() -> None:
        try:
            _write_renamed(path, data, fs)
        except FileNotFoundError:
            if not path.parent.is_dir():
                raise
            _write_renamed(path, data, fs)  # another process took the temporary file for one of a killed process

    retry_transient(write, path)  # a new file each time: after a failed fsync the old one may have lost data


def _write_renamed(path: Path, data: bytes | memoryview, fs: FileSystem) -> None:
    with _renamed_on_success(path, None, fs) as temporary:
        write_synced(temporary, [data], fs)


def remove_temporaries(folder: Path, fs: FileSystem | None = None) -> list[str]:
    """Delete the temporary files that killed processes have left in a folder, and return their names.

    A process that is still writing one writes it again.
    """
    fs = fs or FileSystem()
    names = [name for name in fs.listdir(folder) if _TEMPORARY.fullmatch(name)]
    for name in names:
        with suppress(FileNotFoundError):
            fs.remove(folder / name)
    return names


@contextmanager
def atomic_writer(path: Path, temporary: Path | None = None) -> Iterator[BinaryIO]:
    """An open file that gets its name when the block ends without an error, and is deleted otherwise.

    `temporary` is where the bytes go meanwhile, on the same file system; by default a hidden file beside `path`.
    """
    with naming(path), _renamed_on_success(path, temporary, FileSystem()) as unfinished, unfinished.open("wb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def write_synced(path: Path, pieces: Iterable[bytes | memoryview], fs: FileSystem) -> None:
    """Write a file in place, from the pieces of its content, and wait until it is on disk."""
    with naming(path), fs.create(path) as file:
        for piece in pieces:
            rest = memoryview(piece)
            while rest:
                rest = rest[fs.write(file, rest[:_CHUNK_BYTES]) :]
        fs.fsync(file)


@contextmanager
def _renamed_on_success(path: Path, temporary: Path | None, fs: FileSystem) -> Iterator[Path]:
    # Process ids repeat across containers that share a file system, so the name is random.
    temporary = temporary or path.with_name(f".{path.name}.{uuid.uuid4().hex[:12]}.tmp")
    try:
        yield temporary
        fs.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            fs.remove(temporary)
        raise
    fs.fsync_dir(path.parent)


@contextmanager
def disk_errors(path: Path, otherwise: str = _OTHER_FOLDER, fs: FileSystem | None = None) -> Iterator[None]:
    """Turn an OSError of the block into a `ResourceError`; `otherwise` is what the user can do instead."""
    try:
        yield
    except OSError as error:
        raise disk_error(path, error, otherwise, fs) from error


def disk_error(
    path: Path, error: OSError, otherwise: str = _OTHER_FOLDER, fs: FileSystem | None = None
) -> ResourceError:
    """The error for a failed write: which path, how much space is left, what to do."""
    reason = error.strerror or str(error)
    if error.errno in _DISK_FULL:
        what = "the disk quota is used up" if error.errno == errno.EDQUOT else "the disk is full"
        return disk_full_error(path, what, fs=fs)
    if error.errno in _NOT_PERMITTED:
        return ResourceError(
            "folder is not writable",
            where=str(path),
            why=reason,
            hint=f"ls -ld '{path if os.path.isdir(path) else path.parent}', or {otherwise}",
        )
    if error.errno in _NOT_A_FOLDER:
        blocking = next((place for place in (path, *path.parents) if os.path.isfile(place)), path)
        return ResourceError(
            "a file is where a folder should be",
            where=str(blocking),
            why=f"the folder would be {path}",
            hint=f"{otherwise}, or move the file away",
        )
    return ResourceError(
        "could not write",
        where=str(path),
        why=f"{reason} ({errno.errorcode.get(error.errno or 0, 'no error code')})",
        hint=f"check the disk (dmesg, mount), or {otherwise}",
    )


def system_error(error: OSError, folder: Path | None = None) -> ReconvError:
    """The error for whatever the system has refused; `folder` is named if the error names no file."""
    name = error.filename if isinstance(error.filename, str | bytes | os.PathLike) else None
    path = folder if name is None else Path(os.fsdecode(name))
    if path is not None and error.errno in _DISK_FULL | _NOT_PERMITTED:
        return disk_error(path, error)
    if path is not None and error.errno in _BAD_NAMES:
        name = str(path)
        shown = name if len(name) <= _MAX_NAME else f"{name[:_MAX_NAME]}... ({len(name):,} characters)"
        return UsageError(f"not a usable path: {shown}", why=_BAD_NAMES[error.errno], hint="use another path")
    limit = "; raise the limit of open files: ulimit -n 8192" if error.errno in _TOO_MANY_FILES else ""
    return ResourceError(
        "the system refused to read or write a file",
        where="" if path is None else str(path),
        why=f"{error.strerror or error} ({errno.errorcode.get(error.errno or 0, 'no error code')})",
        hint=f"check the disk (dmesg, mount, df), then run the same command again{limit}",
    )


def disk_full_error(
    path: Path, what: str, needed_bytes: int | None = None, fs: FileSystem | None = None
) -> ResourceError:
    """The error for a lack of space, with what is free and, where known, what is needed."""
    needed = "" if needed_bytes is None else f"{_megabytes(needed_bytes)} needed, "
    return ResourceError(
        what,
        where=str(path),
        why=f"{needed}{_free_text(path, fs or FileSystem())} free",
        hint="free some space (or lower save.keep_last), then run the same command with --resume",
    )


def _free_text(path: Path, fs: FileSystem) -> str:
    existing = next((p for p in (path, *path.parents) if os.path.exists(p)), None)  # False where stat fails
    if existing is None:
        return "unknown"
    try:
        return _megabytes(fs.free_bytes(existing))
    except OSError as error:
        return f"unknown ({error.strerror})"


def _megabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.1f} MB"
