"""Download a file over HTTP and resume a broken transfer.

Bytes that have arrived are never fetched again, and a download counts as complete only at the announced length.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from reconv.errors import ReconvError

Progress = Callable[[int, int | None], None]  # bytes done, total bytes if known

_TIMEOUT_S = 60
_MAX_FAILURES = 5  # in a row, without a byte in between
_BLOCK_BYTES = 1 << 18


def download(
    url: str, part: Path, progress: Progress, *, error: type[ReconvError], otherwise: str = "check the address"
) -> None:
    """Download to `part`, resuming from the bytes it has, and retrying as long as retries bring bytes.

    A failure is raised as `error`; `otherwise` is what the user can do if the server does not send the file.
    """
    failures = 0
    while True:
        size_before = part.stat().st_size if part.exists() else 0
        try:
            reason = _transfer(url, part, progress)
        except _RefusedError as refused:
            raise error(f"cannot download {url}", where=url, why=str(refused), then=otherwise) from refused
        if reason is None:
            return
        failures = 0 if part.exists() and part.stat().st_size > size_before else failures + 1
        if failures == _MAX_FAILURES:
            raise error(
                f"download of {url} was interrupted",
                where=str(part),
                why=reason,
                then=f"run the same command again to resume; or {otherwise}",
            )


def digest(path: Path, algorithm: str) -> str:
    """The hexadecimal digest of a file."""
    hasher = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            hasher.update(block)
    return hasher.hexdigest()


def no_progress(done: int, total: int | None) -> None:
    """A progress callback that shows nothing."""


class _RefusedError(Exception):
    """The server refuses to send this file, so retrying does not help."""


def _transfer(url: str, part: Path, progress: Progress) -> str | None:
    """One request for the rest of the file: None if it is complete, else the reason why not."""
    done = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={done}-"} if done else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                done = 0  # the server ignored the range and sends the whole file
            total = _total_bytes(response, done)
            done = _write(response, part, done, total, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None  # nothing is left to send; the caller checks the checksum
        if error.code < 500:
            raise _RefusedError(f"the server returned {error.code} {error.reason}") from error
        return f"the server returned {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"the server cannot be reached: {error.reason}"
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        return f"the connection was lost: {error}"
    if total is not None and done < total:
        return f"the connection was lost after {done:,} of {total:,} bytes"
    return None


def _write(response: http.client.HTTPResponse, part: Path, done: int, total: int | None, progress: Progress) -> int:
    """Write the response's body to `part` after its first `done` bytes; returns the new length."""
    with open(part, "r+b" if done else "wb") as file:
        file.seek(done)
        file.truncate()
        progress(done, total)
        while block := response.read(_BLOCK_BYTES):
            file.write(block)
            done += len(block)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    return done


def _total_bytes(response: http.client.HTTPResponse, done: int) -> int | None:
    length = response.headers.get("Content-Length")
    return done + int(length) if length is not None and length.isdigit() else None
