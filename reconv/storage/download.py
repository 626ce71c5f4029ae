"""Download a file over HTTP and resume a broken transfer.

A transfer is resumed only if the server confirms by its ETag or date that the file is still the same (If-Range); bytes
of two versions are never mixed. A download counts as complete only at the announced length.
"""

from __future__ import annotations

import hashlib
import http.client
import ipaddress
import os
import re
import shutil
import stat
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from email.message import Message
from pathlib import Path

from reconv.core.errors import ReconvError, UsageError
from reconv.storage.files import without_links
from reconv.storage.object_stores.store import split_url

Progress = Callable[[int, int | None], None]  # bytes done, total bytes if known

_TIMEOUT_S = 60
_MAX_FAILURES = 5  # in a row, without a byte in between
_BLOCK_BYTES = 1 << 18
MAX_BYTES = 1 << 36  # 64 GiB; the largest known archive has 19 GB
MAX_UNKNOWN_BYTES = 4 << 30  # of a file whose size the server does not announce
_HEADROOM_BYTES = 64 << 20
_HTTP_VARIABLE = "RECONV_ALLOW_HTTP"


def download(
    url: str,
    part: Path,
    progress: Progress,
    *,
    error: type[ReconvError],
    otherwise: str = "check the address",
    max_bytes: int = MAX_BYTES,
    allow_http: bool = False,
    headers: Mapping[str, str] = {},
) -> None:
    """Download to `part`, resuming from the bytes it has, and retrying as long as retries bring bytes.

    A failure is raised as `error`; `otherwise` is what the user can do if the server does not send the file. Plain http
    is refused unless `allow_http`, for files whose published checksum is verified, or the server is this machine.
    `headers` go to the server of the URL alone, not to one that it redirects to.
    """
    if not allow_http:
        require_https(url)
    split_url(url)
    failures = 0
    while True:
        _refuse_links(part, error)
        size_before = part.stat().st_size if part.exists() else 0
        try:
            reason = _transfer(url, part, progress, max_bytes, headers)
        except _RefusedError as refused:
            raise error(f"cannot download {url}", where=url, why=str(refused), hint=otherwise) from refused
        if reason is None:
            _validator_file(part).unlink(missing_ok=True)
            return
        failures = 0 if part.exists() and part.stat().st_size > size_before else failures + 1
        if failures == _MAX_FAILURES:
            raise error(
                f"download of {url} was interrupted",
                where=str(part),
                why=reason,
                hint=f"run the same command again to resume; or {otherwise}",
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


def _transfer(url: str, part: Path, progress: Progress, max_bytes: int, private: Mapping[str, str]) -> str | None:
    """One request for the rest of the file: None if it is complete, else the reason why not."""
    done, validator = _resume_point(part)
    headers = {"Range": f"bytes={done}-", "If-Range": validator} if done else {}
    request = urllib.request.Request(url, headers=headers)
    for name, value in private.items():
        request.add_unredirected_header(name, value)
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT_S) as response:
            if response.status != http.HTTPStatus.PARTIAL_CONTENT or _first_byte(response) != done:
                if response.status == http.HTTPStatus.PARTIAL_CONTENT:
                    _forget(part)
                    return "the server sent another part of the file than was asked for"
                done = 0  # another version by now, or a server without ranges: the whole file comes
            elif not _is_version(response.headers, validator):
                _forget(part)
                return "the server sent a part of another version of the file"
            if url.startswith("https:") and not response.geturl().startswith("https:"):
                raise _RefusedError(f"the server redirects to {response.geturl()}, which is not https")
            total = _total_bytes(response, done)
            if total is None:
                max_bytes = min(max_bytes, MAX_UNKNOWN_BYTES)
            elif total > max_bytes:
                raise _RefusedError(f"the file has {total:,} bytes, more than the limit of {max_bytes:,}")
            elif total - done > (free := shutil.disk_usage(part.parent).free - _HEADROOM_BYTES):
                raise _RefusedError(f"the file has {total:,} bytes, and the disk has room for {done + max(0, free):,}")
            if done == 0:
                with open(_validator_file(part), "w", encoding="utf-8", opener=without_links) as file:
                    file.write(_validator(response.headers))
            done = _write(response, part, done, total, progress, max_bytes)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code == http.HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            size = re.fullmatch(r"bytes \*/(\d{1,18})", error.headers.get("Content-Range") or "")
            if size is not None and int(size[1]) == done and _is_version(error.headers, validator):
                return None  # nothing is left to send
            _forget(part)
            return "the file on the server is shorter than the part that was downloaded, or another version"
        if error.code < 500:
            raise _RefusedError(f"the server returned {error.code} {error.reason}") from error
        return f"the server returned {error.code} {error.reason}"
    except urllib.error.URLError as error:
        return f"the server cannot be reached: {error.reason}"
    except (http.client.HTTPException, ConnectionError, TimeoutError) as error:
        return f"the connection was lost: {error}"
    except ValueError as error:  # urllib's, of a redirect
        raise _RefusedError(f"the server redirects to an invalid address: {error}") from error
    if total is not None and done < total:
        return f"the connection was lost after {done:,} of {total:,} bytes"
    return None


def require_https(url: str) -> None:
    """Refuse plain http, over which anyone on the way can replace the file."""
    address = split_url(url)
    if address.scheme == "https" or os.environ.get(_HTTP_VARIABLE) == "1":
        return
    host = address.hostname or ""
    try:
        is_local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_local = False
    if not is_local:
        raise UsageError(
            f"{url} is not an https address",
            why="over plain http anyone on the way can replace the file",
            hint=f"use https, or {_HTTP_VARIABLE}=1 if you trust the network",
        )


def _validator_file(part: Path) -> Path:
    """File with the ETag or date of an unfinished download."""
    return part.with_name(part.name + ".etag")


def _validator(headers: Message) -> str:
    """Identifier of this version of the file; empty if the server does not say (a weak ETag does not)."""
    etag = headers.get("ETag") or ""
    return etag if etag and not etag.startswith("W/") else headers.get("Last-Modified") or ""


def _is_version(headers: Message, validator: str) -> bool:
    """True if a response is about the version that was asked for: some servers ignore If-Range.

    A server may leave the date out where it confirms it, but not the ETag.
    """
    now = _validator(headers)
    return now == validator or (not now and not validator.startswith('"'))


def _refuse_links(part: Path, error: type[ReconvError]) -> None:
    """Raise if something else than a file of ours would be written to, or sent to the server."""
    for path in (part, _validator_file(part)):
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            raise error(
                f"{path.name} is not a file, and the download would be written to it",
                where=str(path),
                why=f"it is a link to {os.readlink(path)}"
                if path.is_symlink()
                else "it is a folder, a pipe or a device",
                hint=f"look at it, then remove it: rm '{path}'",
            )


def _resume_point(part: Path) -> tuple[int, str]:
    """Number of bytes on disk, and their version; zero bytes if the version is unknown."""
    if not part.exists() or not _validator_file(part).exists():
        return 0, ""
    validator = _validator_file(part).read_text(encoding="utf-8", errors="replace").strip()
    return (part.stat().st_size, validator) if validator else (0, "")


def _forget(part: Path) -> None:
    """Start from the beginning at the next request."""
    part.unlink(missing_ok=True)
    _validator_file(part).unlink(missing_ok=True)


def _first_byte(response: http.client.HTTPResponse) -> int | None:
    """The position of the first byte that a partial response contains."""
    found = re.fullmatch(r"bytes (\d{1,18})-\d+/(?:\d+|\*)", response.headers.get("Content-Range") or "")
    return int(found[1]) if found else None


def _write(
    response: http.client.HTTPResponse, part: Path, done: int, total: int | None, progress: Progress, max_bytes: int
) -> int:
    """Write the response's body to `part` after its first `done` bytes; returns the new length."""
    with open(part, "r+b" if done else "wb", opener=without_links) as file:
        file.seek(done)
        file.truncate()
        progress(done, total)
        while block := response.read(_BLOCK_BYTES):
            if done + len(block) > max_bytes:
                raise _RefusedError(f"the server sends more than the limit of {max_bytes:,} bytes")
            file.write(block)
            done += len(block)
            progress(done, total)
        file.flush()
        os.fsync(file.fileno())
    return done


def _total_bytes(response: http.client.HTTPResponse, done: int) -> int | None:
    length = response.headers.get("Content-Length")
    return done + int(length) if length is not None and length.isdigit() else None
