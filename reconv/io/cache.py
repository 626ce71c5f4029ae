"""The folder for files that can be downloaded or made again; everything in it may be deleted."""

from __future__ import annotations

import os
from pathlib import Path

CACHE_ENV = "RECONV_CACHE"


def cache_dir() -> Path:
    """$RECONV_CACHE, else ~/.cache/reconv."""
    path = os.environ.get(CACHE_ENV)
    return Path(path).expanduser() if path else Path.home() / ".cache" / "reconv"
