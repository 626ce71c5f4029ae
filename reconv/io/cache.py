"""Where Reconv keeps what it can fetch or make again.

Owns the place and its variable. Refuses to know what is kept there. Invariant: everything in it may be deleted.
"""

from __future__ import annotations

import os
from pathlib import Path

CACHE_VARIABLE = "RECONV_CACHE"


def cache_folder() -> Path:
    """$RECONV_CACHE, else ~/.cache/reconv."""
    named = os.environ.get(CACHE_VARIABLE)
    return Path(named).expanduser() if named else Path.home() / ".cache" / "reconv"
