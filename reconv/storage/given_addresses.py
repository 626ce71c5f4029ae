"""The addresses that this user has given, in commands and in recipes: what comes from elsewhere may name others."""

from __future__ import annotations

import os
from contextlib import suppress

from reconv.storage.bounded import read_bytes
from reconv.storage.cache import cache_dir
from reconv.storage.object_stores.store import ADDRESS

_FILE = "addresses.txt"  # an address in each line; without it the user is asked again
_MAX_BYTES = 1 << 20


def remember_address(url: str) -> None:
    """Note that the user has given this address; on a disk that cannot be written they are asked again."""
    if is_given(url):
        return
    with suppress(OSError):
        cache_dir().mkdir(parents=True, exist_ok=True)
        with open(cache_dir() / _FILE, "ab") as file:
            file.write(_normal(url) + b"\n")


def is_given(url: str) -> bool:
    """True if this user has given the address before."""
    with suppress(OSError):
        return _normal(url) in read_bytes(cache_dir() / _FILE, _MAX_BYTES).split(b"\n")
    return False


def _normal(url: str) -> bytes:
    """The address on one line, without a slash at its end; a `Path` has lost one of its slashes."""
    found = ADDRESS.fullmatch(url)
    text = url if found is None else f"{found[1]}://{found[2].lstrip('/')}"
    return os.fsencode(text.rstrip("/").encode("unicode_escape").decode())
