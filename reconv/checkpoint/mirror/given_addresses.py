"""The addresses of copies of runs that this user has given: a run from elsewhere may name others."""

from __future__ import annotations

import os
from contextlib import suppress

from reconv.core.errors import UsageError
from reconv.storage.bounded import read_bytes
from reconv.storage.cache import cache_dir

NO_MIRROR = "off"
_FILE = "mirrors.txt"  # an address in each line; without it the user is asked again
_MAX_BYTES = 1 << 20


def remember_address(url: str) -> None:
    """Note that the user has given this address; on a disk that cannot be written they are asked again."""
    if is_given(url):
        return
    with suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        with open(cache_dir() / _FILE, "a", encoding="utf-8") as file:
            file.write(f"{url}\n")


def is_given(url: str) -> bool:
    """Whether this user has given the address before."""
    with suppress(OSError):
        return os.fsencode(url) in read_bytes(cache_dir() / _FILE, _MAX_BYTES).split(b"\n")
    return False


def check_address(url: str, where: str) -> None:
    """Raise unless this user has given the address that a run directory notes for its copy."""
    if not is_given(url):
        raise UsageError(
            f"this run says that its copy is at {url}, an address that you have not given",
            where=where,
            why="the run would be read from there and written there",
            then=f"if it is yours: reconv resume RUN --mirror '{url}'; to leave it alone: --mirror off",
        )
