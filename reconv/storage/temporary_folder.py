"""A temporary folder that is deleted at the end, or by the next one of its kind if the process was killed."""

from __future__ import annotations

import fcntl
import os
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_LOCK = ".in-use"  # locked by the owner for as long as it lives, in whatever container
_UNLOCKED_S = 3600  # a folder without the file is not deleted before: its owner may be about to create it


@contextmanager
def temporary_folder(kind: str) -> Iterator[Path]:
    """A new folder `reconv-KIND-...`, private to this user; those that killed processes left are deleted first."""
    prefix = f"reconv-{kind}-"
    sweep(prefix)
    with tempfile.TemporaryDirectory(prefix=prefix) as name:
        lock = os.open(Path(name) / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            with suppress(OSError):  # a file system without locks: the folder may be left behind
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield Path(name)
        finally:
            os.close(lock)


def has_owner(folder: Path) -> bool:
    """True if the process that made a folder is alive, as far as locks can tell."""
    try:
        lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    except OSError:
        return True
    try:
        fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:  # it is locked, or there are no locks on this file system
        return True
    finally:
        os.close(lock)
    return False


def sweep(prefix: str) -> list[Path]:
    """Delete the folders of killed processes of this user, and return them."""
    swept = []
    with suppress(OSError), os.scandir(tempfile.gettempdir()) as entries:
        for entry in list(entries):
            if entry.name.startswith(prefix) and _is_abandoned(entry):
                shutil.rmtree(entry.path, ignore_errors=True)
                swept.append(Path(entry.path))
    return swept


def _is_abandoned(entry: os.DirEntry[str]) -> bool:
    try:
        status = entry.stat(follow_symlinks=False)
    except OSError:  # another process has swept it
        return False
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        return False
    try:
        lock = os.open(os.path.join(entry.path, _LOCK), os.O_RDWR | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return time.time() - status.st_mtime > _UNLOCKED_S
    except OSError:
        return False
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(lock)
    return True
