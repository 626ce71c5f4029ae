"""The folder for files that can be downloaded or made again; everything in it may be deleted."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_ENV = "RECONV_CACHE"
REMOTE_FOLDER = "remote"  # what was read from object stores
STUB_MODE = 0o000  # of files there that stand for objects, whose bytes are read another way


def cache_dir() -> Path:
    """$RECONV_CACHE, else ~/.cache/reconv."""
    path = os.environ.get(CACHE_ENV)
    return Path(path).expanduser() if path else Path.home() / ".cache" / "reconv"


def remote_trees() -> str:
    """Folder in which object stores appear as files, with a slash at the end."""
    return f"{cache_dir()}/{REMOTE_FOLDER}/trees/"
