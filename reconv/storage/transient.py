"""Errors of disks and network file systems: which of them may pass, and waiting for those.

A network disk returns EIO, ESTALE or a time-out while its server restarts. Such a call is tried again a few times, with
a line on stderr; what is then still refused is a fault of the machine, not of the file.

An OSError about the machine rather than the path ends with exit code 6 and the path, wherever it happens: as
`UnreadableDataError` and `UnreadableRunError` where files are read, by `disk_error` where they are written, by
`system_error` at the end of a run for the rest (tests/faults/test_refused_writes.py).
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from reconv.core.text import printable

T = TypeVar("T")

RETRY_DELAYS_S = (0.1, 0.4, 1.0, 2.0)
_TRANSIENT = frozenset({errno.EIO, errno.ESTALE, errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT})
# These say something about the path, not about the machine.
_ABOUT_THE_PATH = frozenset(
    {
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.EINVAL,
        errno.ENXIO,
        errno.EEXIST,
        errno.ENOTEMPTY,
    }
)


def is_machine_fault(error: OSError) -> bool:
    """True if the system refused a call that would have worked on a healthy disk with enough rights and resources."""
    return error.errno is not None and error.errno not in _ABOUT_THE_PATH


def retry_transient(function: Callable[[], T], path: str | Path) -> T:
    """Call a function that may be called again; errors that may pass are waited for, a few seconds at most."""
    for number, delay_s in enumerate(RETRY_DELAYS_S, 1):
        try:
            return function()
        except OSError as error:
            if error.errno not in _TRANSIENT:
                raise
            tries = f"try {number + 1} of {len(RETRY_DELAYS_S) + 1} in {delay_s:g} s"
            print(f"{printable(str(path))}: {error.strerror}; {tries}", file=sys.stderr, flush=True)
        time.sleep(delay_s)
    return function()


@contextmanager
def naming(path: str | Path) -> Iterator[None]:
    """Name the file in an OSError of the block that names none, such as one of a write or a read."""
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = os.fspath(path)
        raise
