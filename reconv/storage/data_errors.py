"""The errors for data that cannot be read."""

from __future__ import annotations

import errno
from pathlib import Path

from reconv.core.errors import ChangedDataError, DataError, UnreadableDataError
from reconv.storage import bounded
from reconv.storage.object_stores.errors import ChangedObjectError, StoreError
from reconv.storage.transient import is_machine_fault


def unreadable(path: str | Path, error: OSError) -> DataError:
    """The error for a file or folder that cannot be read; one that the system refuses to read is not a bad one."""
    hint = "check that it exists and that you may read it"
    if error.errno == errno.EMFILE:
        hint = "raise the limit of open files: ulimit -n 8192"
    elif isinstance(error, bounded.NotRegularFileError):
        hint = "replace it by a regular file, or remove it"
    elif isinstance(error, bounded.TooLargeError | bounded.NotTextError):
        hint = "replace or remove it; docs/how-to/data.md lists the limits"
    elif isinstance(error, StoreError):
        hint, path = error.hint, error.filename
    kind = UnreadableDataError if is_machine_fault(error) else DataError
    if isinstance(error, ChangedObjectError):
        kind = ChangedDataError
    return kind(f"cannot read {path}", where=str(path), why=error.strerror or str(error), hint=hint)


def truncated(path: str | Path, size: int, length: int, start: int) -> DataError:
    """The error for a file with fewer bytes than it should have."""
    return DataError(
        f"file ends early: {size} of {length} bytes from offset {start}",
        where=str(path),
        why="the file was not completely written or copied",
        hint="copy or download it again",
    )
