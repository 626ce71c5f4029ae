"""Files on a web server: read-only, by ranges, without further packages."""

from __future__ import annotations

import http.client
import re
import urllib.error
import urllib.request
from email.utils import parsedate_to_datetime
from functools import lru_cache
from http import HTTPStatus
from pathlib import Path
from typing import IO
from urllib.parse import urlsplit

from reconv.core.errors import UsageError
from reconv.storage.download import require_https
from reconv.storage.object_stores.errors import (
    AccessDeniedError,
    ChangedObjectError,
    MissingObjectError,
    StoreError,
    StoreUnavailableError,
)
from reconv.storage.object_stores.store import MAX_OBJECT_BYTES, ObjectInfo, quoted_url

TIMEOUT_S = 20.0
_TEMPORARY_CODES = frozenset({408, 425, 429})  # and all from 500 on


class HttpStore:
    """The files below an address."""

    def __init__(self, root: str) -> None:
        require_https(root)
        self.root = root

    def list(self) -> list[ObjectInfo]:
        raise StoreError(
            self.root,
            "a web server has no list of files",
            "write one before the upload: reconv data index DIR",
        )

    def info(self, name: str) -> ObjectInfo:
        with self._request(name, "HEAD", {}) as response:
            length = response.headers.get("Content-Length") or ""
            etag = _version(response)
            if not _is_number(length) or int(length) > MAX_OBJECT_BYTES or not etag:
                raise StoreError(
                    quoted_url(self.root, name),
                    "the server sends no usable Content-Length, or neither an ETag nor a date",
                    "use a server that does: without them a changed file cannot be noticed",
                )
            return ObjectInfo(name, int(length), etag, modified_s=_modified_s(response))

    def read(self, item: ObjectInfo, start: int, length: int) -> bytes:
        url = quoted_url(self.root, item.name)
        if not length:
            return b""
        with self._request(item.name, "GET", {"Range": f"bytes={start}-{start + length - 1}"}) as response:
            if item.etag and _version(response) != item.etag:
                raise ChangedObjectError(url, f"it is now {_version(response)}, and was {item.etag}")
            if response.status == HTTPStatus.PARTIAL_CONTENT:
                sent = re.fullmatch(
                    r"bytes (\d{1,18})-(\d{1,18})/(\d{1,18}|\*)", response.headers["Content-Range"] or ""
                )
                if sent is None or int(sent[1]) != start:
                    raise StoreUnavailableError(url, "the server sent another range than was asked for")
                if sent[3] not in ("*", str(item.num_bytes)):
                    raise ChangedObjectError(url, f"it has {sent[3]} bytes, and had {item.num_bytes}")
            elif start or length != item.num_bytes:
                raise StoreError(url, "the server sends whole files only", "use a server that supports ranges")
            return _read_body(response, length, url)

    def write(self, name: str, content: bytes | Path) -> None:
        raise UsageError("a web server is read-only", where=self.root, hint="write to s3://, gs:// or az://")

    def delete(self, name: str) -> None:
        raise UsageError("a web server is read-only", where=self.root)

    def _request(self, name: str, method: str, headers: dict[str, str]) -> http.client.HTTPResponse:
        url = quoted_url(self.root, name)
        request = urllib.request.Request(url, headers={"Accept-Encoding": "identity", **headers}, method=method)
        try:
            response: http.client.HTTPResponse = _opener().open(request, timeout=TIMEOUT_S)
        except StoreError:
            raise
        except urllib.error.HTTPError as error:
            error.close()
            raise _refused(url, error) from error
        except urllib.error.URLError as error:
            raise StoreUnavailableError(url, f"the server cannot be reached: {error.reason}") from error
        except (http.client.HTTPException, OSError) as error:
            raise StoreUnavailableError(url, f"the connection was lost: {error}") from error
        return response


class _HttpsRedirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects as from a bucket to a mirror, but not to what could not be read directly: plain http, ftp."""

    def redirect_request(
        self,
        req: urllib.request.Request,
        fp: IO[bytes],
        code: int,
        msg: str,
        headers: http.client.HTTPMessage,
        newurl: str,
    ) -> urllib.request.Request | None:
        is_downgrade = req.full_url.startswith("https:") and not newurl.startswith("https:")
        try:
            if is_downgrade or urlsplit(newurl).scheme not in ("https", "http"):
                raise UsageError("")
            require_https(newurl)
        except UsageError:
            fp.close()
            raise StoreError(req.full_url, f"the server redirects to {newurl}, which is not https") from None
        return super().redirect_request(req, fp, code, msg, headers, newurl)


@lru_cache(maxsize=1)
def _opener() -> urllib.request.OpenerDirector:
    return urllib.request.build_opener(_HttpsRedirects)


def _is_number(text: str) -> bool:
    return re.fullmatch(r"[0-9]{1,15}", text) is not None


def _refused(url: str, error: urllib.error.HTTPError) -> StoreError:
    text = f"the server returned {error.code} {error.reason}"
    if error.code in (HTTPStatus.NOT_FOUND, HTTPStatus.GONE):
        return MissingObjectError(url, text)
    if error.code in (HTTPStatus.UNAUTHORIZED, HTTPStatus.FORBIDDEN):
        return AccessDeniedError(url, text)
    if error.code in (HTTPStatus.PRECONDITION_FAILED, HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE):
        return ChangedObjectError(url, text)
    if error.code >= 500 or error.code in _TEMPORARY_CODES:
        after = error.headers.get("Retry-After") or ""
        return StoreUnavailableError(url, text, retry_after_s=float(after) if _is_number(after) else 0.0)
    return StoreError(url, text)


def _read_body(response: http.client.HTTPResponse, length: int, url: str) -> bytes:
    """Exactly `length` bytes; anything less or more is a broken transfer."""
    try:
        body = response.read(length)
        is_longer = len(body) == length and bool(response.read(1))
    except http.client.IncompleteRead as error:
        raise StoreUnavailableError(url, f"the server sent {len(error.partial):,} of {length:,} bytes") from error
    except (http.client.HTTPException, OSError) as error:
        raise StoreUnavailableError(url, f"the connection was lost: {error}") from error
    if len(body) < length or is_longer:
        sent = "more bytes than asked for" if is_longer else f"{len(body):,} of {length:,} bytes"
        raise StoreUnavailableError(url, f"the server sent {sent}")
    return body


def _version(response: http.client.HTTPResponse) -> str:
    """A strong ETag, else the date: a weak ETag does not identify the bytes."""
    etag = response.headers.get("ETag") or ""
    return etag if etag and not etag.startswith("W/") else response.headers.get("Last-Modified") or ""


def _modified_s(response: http.client.HTTPResponse) -> float:
    try:
        return parsedate_to_datetime(response.headers.get("Last-Modified") or "").timestamp()
    except ValueError:
        return 0.0
