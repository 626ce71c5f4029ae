"""Names that survive a power cut: a folder synced, not only the files in it."""

from __future__ import annotations

import errno
import os
from pathlib import Path


def sync_folder(path: Path) -> None:
    """Wait until the folder's names are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems cannot sync a folder and say so with EINVAL; their renames are synchronous.
        if error.errno != errno.EINVAL:
            raise
    finally:
        os.close(descriptor)
