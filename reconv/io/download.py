"""Bringing a file from a server to the disk, going on where a broken transfer stopped.

Owns requests, ranges, new tries and digests. Refuses to know what the file is for: the caller says which error its
reader should see. Invariant: bytes that have arrived are never fetched again, and nobody is told that a file is whole
before the server has sent as much as it announced.
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

Progress = Callable[[int, int | None], None]  # bytes there, bytes in all if known

_TIMEOUT_S = 60
_ATTEMPTS = 5  # without any progress in between
_BLOCK_BYTES = 1 << 18


def download(
    url: str, part: Path, progress: Progress, *, error: type[ReconvError], otherwise: str = "check the address"
) -> None:
    """Bring `part` to its full length, going on from what is there, with new tries as long as they bring bytes.

    A failure is raised as `error`; `otherwise` is what its reader can do when the server will not serve.
    """
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        try:
            reason = _transfer(url, part, progress)
        except _RefusedError as refusal:
            raise error(f"cannot download {url}", where=url, why=str(refusal), then=otherwise) from refusal
        if reason is None:
            return
        failures = 0 if part.exists() and part.stat().st_size > before else failures + 1
        if failures == _ATTEMPTS:
            raise error(
                f"download of {url} broke off",
                where=str(part),
                why=reason,
                then=f"type the same command again: it goes on where it stopped; or {otherwise}",
            )


def digest(path: Path, algorithm: str) -> str:
    """The hexadecimal digest of a file."""
    sums = hashlib.new(algorithm, usedforsecurity=False)
    with open(path, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            sums.update(block)
    return sums.hexdigest()


def silent(there: int, total: int | None) -> None:
    """No progress is shown."""


class _RefusedError(Exception):
    """The server will not send this file, now or later."""


def _transfer(url: str, part: Path, progress: Progress) -> str | None:
    """One request for the rest of the file: None when it is whole, else why it is not."""
    there = part.stat().st_size if part.exists() else 0
    request = urllib.request.Request(url, headers={"Range": f"bytes={there}-"} if there else {})
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT:
                there = 0  # the server sends the whole file, whatever was asked for
            total = _total_bytes(response, there)
            there = _write(response, part, there, total, progress)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            return None  # nothing is left to send: the checksum will tell whether this is the file
        if error.code < 500:
            raise _RefusedError(f"the server says {error.code} {error.reason}") from error
        return f"the server says {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"the server cannot be reached: {error.reason}"
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        return f"the connection was cut: {error}"
    if total is not None and there < total:
        return f"the connection was cut after {there:,} of {total:,} bytes"
    return None


def _write(response: http.client.HTTPResponse, part: Path, there: int, total: int | None, progress: Progress) -> int:
    """Append the response's body to `part` after its first `there` bytes; the length reached."""
    with open(part, "r+b" if there else "wb") as file:
        file.seek(there)
        file.truncate()
        progress(there, total)
        while block := response.read(_BLOCK_BYTES):
            file.write(block)
            there += len(block)
            progress(there, total)
        file.flush()
        os.fsync(file.fileno())
    return there


def _total_bytes(response: http.client.HTTPResponse, there: int) -> int | None:
    length = response.headers.get("Content-Length")
    return there + int(length) if length is not None and length.isdigit() else None
