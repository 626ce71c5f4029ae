"""Errors of object stores, and waiting for those that may pass.

They are OSErrors, so that data and runs in a store fail as files on a disk do. No errno is one that
`io.transient` waits for: the waiting is done here.
"""

from __future__ import annotations

import errno
import sys
import threading
import time
from collections.abc import Callable
from typing import TypeVar

from reconv.core.text import printable

T = TypeVar("T")

RETRY_DELAYS_S = (0.2, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
_NOTICE_S = 5.0  # between two lines about failing requests
_last_notice_s = 0.0
_notice_lock = threading.Lock()


class StoreError(OSError):
    """A request that a store refused or did not respond to; `then` is what the user can do."""

    errno_of_kind = errno.EREMOTEIO
    hint = "check the network and the address, then run the same command again"

    def __init__(self, url: str, why: str, hint: str = "") -> None:
        super().__init__(self.errno_of_kind, why, url)
        self.hint = hint or type(self).hint

    def __reduce__(self) -> tuple[type[StoreError], tuple[str, str, str]]:
        return type(self), (self.filename, self.strerror or "", self.hint)


class StoreUnavailableError(StoreError):
    """An error that may pass: the server is overloaded, or a connection was cut."""

    def __init__(self, url: str, why: str, hint: str = "", retry_after_s: float = 0.0) -> None:
        super().__init__(url, why, hint)
        self.retry_after_s = retry_after_s


class MissingObjectError(StoreError):
    """There is no such object or bucket."""

    errno_of_kind = errno.ENOENT
    hint = "check the address"


class AccessDeniedError(StoreError):
    """No credentials, wrong ones, or ones without the right to do this."""

    errno_of_kind = errno.EACCES
    hint = "set the credentials of the store (docs/how-to/object-stores.md); reconv doctor --store URL checks them"


class ChangedObjectError(StoreError):
    """The object is not the version that was asked for."""

    errno_of_kind = errno.EREMCHG
    hint = "start again with the data as it is now, as a new run; or put the old objects back"


class RetryStoppedError(Exception):
    """The caller no longer wants the result."""


def retry_store(function: Callable[[], T], url: str, stop: threading.Event | None = None) -> T:
    """Call a function again while the store is unavailable, about half a minute in all."""
    for number, delay_s in enumerate(RETRY_DELAYS_S, 1):
        try:
            return function()
        except StoreUnavailableError as error:
            delay_s = max(delay_s, min(error.retry_after_s, RETRY_DELAYS_S[-1]))
            _notice(f"{url}: {error.strerror}; try {number + 1} of {len(RETRY_DELAYS_S) + 1} in {delay_s:g} s")
        if stop is None:
            time.sleep(delay_s)
        elif stop.wait(delay_s):
            raise RetryStoppedError
    return function()


def _notice(text: str) -> None:
    """Print a line, but not one for each of many requests that fail together."""
    global _last_notice_s
    with _notice_lock:
        now_s = time.monotonic()
        if _last_notice_s and now_s - _last_notice_s < _NOTICE_S:
            return
        _last_notice_s = now_s
    print(printable(text), file=sys.stderr, flush=True)
