"""Stores through fsspec: local folders and memory. `s3_store`, `gcs_store` and `azure_store` extend it."""

from __future__ import annotations

import errno
import hashlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

from reconv.core.errors import ResourceError, UsageError
from reconv.storage.object_stores.errors import (
    AccessDeniedError,
    ChangedObjectError,
    MissingObjectError,
    StoreError,
    StoreUnavailableError,
)
from reconv.storage.object_stores.store import SCHEMES, ObjectInfo, join_url

T = TypeVar("T")

TIMEOUT_S = 20
_VERSION_FIELDS = ("ETag", "etag", "generation", "md5Hash", "content_md5", "mtime", "LastModified", "last_modified")
_MODIFIED_FIELDS = ("LastModified", "last_modified", "mtime", "updated", "created")
# By class name, since the packages are extras: what says that a request may be tried again.
_TEMPORARY_NAMES = frozenset(
    {
        "ClientError",  # of aiohttp
        "ClientConnectionError",
        "ServerTimeoutError",
        "FSTimeoutError",
        "HTTPClientError",
        "ResponseStreamingError",
        "ServiceRequestError",
        "ServiceResponseError",
        "HttpProcessingError",
        "RequestException",  # of requests, which gcsfs raises for a 502
        "TransportError",  # of google.auth
    }
)
# Of aiohttp, azure and botocore: the body was cut. aiohttp gives them the status 400, which no server has sent.
_CUT_NAMES = frozenset(
    {
        "ClientPayloadError",
        "PayloadEncodingError",
        "ContentLengthError",
        "IncompleteReadError",
        # JSON or XML that ends early
        "JSONDecodeError",
        "DecodeError",
        "ResponseParserError",
    }
)
_CREDENTIALS_NAMES = frozenset(
    {
        "NoCredentialsError",
        "PartialCredentialsError",
        "CredentialRetrievalError",
        "TokenRetrievalError",
        "DefaultCredentialsError",
        "RefreshError",
        "ClientAuthenticationError",
    }
)
_MIN_TEMPORARY_STATUS = 500
_NOT_IMPLEMENTED = 501


class FsspecStore:
    """The objects below an address, by an fsspec file system."""

    options: Mapping[str, Any] = {}

    def __init__(self, root: str) -> None:
        self.root = root
        scheme = urlsplit(root).scheme
        options = {"skip_instance_cache": scheme != "memory", "use_listings_cache": False, **self.options}
        try:
            self.fs: Any = self.open_file_system(scheme, options)
        except ImportError as error:
            extra = SCHEMES[scheme]
            raise UsageError(
                f"{scheme}:// needs another package: {error}", where=root, hint=f"pip install 'reconv[{extra}]'"
            ) from error
        except Exception as error:  # of each package its own: it looks for credentials
            raise ResourceError(
                f"cannot open {root}", where=root, why=_first_line(error), hint=AccessDeniedError.hint
            ) from error
        self._path: str = self.fs._strip_protocol(root)

    def open_file_system(self, scheme: str, options: Mapping[str, Any]) -> Any:
        """The file system, with the credentials of this machine."""
        import fsspec

        return fsspec.filesystem(scheme, **options)

    def list(self) -> list[ObjectInfo]:
        with self.errors(self.root):
            found = self.fs.find(self._path, detail=True)
        prefix = self._path.rstrip("/") + "/"
        items = [_object_info(path[len(prefix) :], info) for path, info in found.items() if path.startswith(prefix)]
        return sorted_objects(items)

    def info(self, name: str) -> ObjectInfo:
        with self.errors(join_url(self.root, name)):
            found = self.fs.info(self.path(name))
        if found.get("type") == "directory":
            raise MissingObjectError(join_url(self.root, name), "there is no such object")
        return _object_info(name, found)

    def read(self, item: ObjectInfo, start: int, length: int) -> bytes:
        url = join_url(self.root, item.name)
        with self.errors(url):
            data: bytes = self.fs.cat_file(self.path(item.name), start=start, end=start + length)
        # Not every store can be asked for a version, so it is compared after the bytes have come.
        if item.etag and (now := self.info(item.name)).etag != item.etag:
            raise ChangedObjectError(url, f"it is now {now.etag}, and was {item.etag}")
        return complete(data, length, url)

    def write(self, name: str, content: bytes | Path) -> None:
        path = self.path(name)
        with self.errors(join_url(self.root, name)):
            if urlsplit(self.root).scheme in ("file", "memory"):
                self.fs.makedirs(self.fs._parent(path), exist_ok=True)
            if isinstance(content, Path):
                self.fs.put_file(str(content), path)
            else:
                self.fs.pipe_file(path, content)

    def delete(self, name: str) -> None:
        with self.errors(join_url(self.root, name)), suppress(FileNotFoundError):
            self.fs.rm_file(self.path(name))

    def path(self, name: str) -> str:
        """Name of an object in the file system."""
        return f"{self._path.rstrip('/')}/{name}" if name else self._path

    @contextmanager
    def errors(self, url: str) -> Iterator[None]:
        """Turn whatever the file system raises into a `StoreError`."""
        try:
            yield
        except StoreError:
            raise
        except Exception as error:  # each package has its own classes
            raise store_error(url, error) from error


class VersionedStore(FsspecStore):
    """A store that can be asked for one version of an object, by its asynchronous client."""

    def read(self, item: ObjectInfo, start: int, length: int) -> bytes:
        url = join_url(self.root, item.name)
        if not length:
            return b""
        with self.errors(url):
            return complete(self.run(self.read_version, item, start, length), length, url)

    async def read_version(self, item: ObjectInfo, start: int, length: int) -> bytes:
        """A range of the object's version that was listed; raises where the store has another one."""
        raise NotImplementedError

    def run(self, function: Callable[..., Awaitable[T]], *args: Any, timeout_s: float | None = 4 * TIMEOUT_S) -> T:
        """Call an asynchronous function in the thread of the file system."""
        from fsspec.asyn import sync

        result: T = sync(self.fs.loop, function, *args, timeout=timeout_s)
        return result


def sorted_objects(items: Iterable[ObjectInfo]) -> list[ObjectInfo]:
    """The objects by name, without those that only mark a folder."""
    return sorted((item for item in items if item.name and not item.name.endswith("/")), key=lambda item: item.name)


def complete(data: bytes, length: int, url: str) -> bytes:
    """The bytes, if they are as many as were asked for."""
    if len(data) != length:
        raise StoreUnavailableError(url, f"the server sent {len(data):,} of {length:,} bytes")
    return data


def store_error(url: str, error: BaseException) -> StoreError:
    """The error of a package as one of ours: by its class, the class it was raised from, and its HTTP status."""
    chain = [error]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None and len(chain) < 10:
        chain.append(cause)
    names = {kind.__name__ for link in chain for kind in type(link).__mro__}
    status = next(filter(None, map(_status, chain)), 0)
    text = _first_line(error)
    if names & _CUT_NAMES:
        return StoreUnavailableError(url, f"the connection was lost: {text}")
    if status == 412 or "FileExpired" in names:
        return ChangedObjectError(url, "the store has another version than before")
    if status == 404 or isinstance(error, FileNotFoundError):
        return MissingObjectError(url, "there is no such object or bucket")
    is_forbidden = text.startswith("Forbidden: ")  # gcsfs makes an OSError without a number of a 403
    if status in (401, 403) or isinstance(error, PermissionError) or names & _CREDENTIALS_NAMES or is_forbidden:
        return AccessDeniedError(url, text)
    is_network = isinstance(error, ConnectionError | TimeoutError) or getattr(error, "errno", 0) in (
        errno.EBUSY,
        errno.EREMOTEIO,
    )
    is_overloaded = (status >= _MIN_TEMPORARY_STATUS and status != _NOT_IMPLEMENTED) or status == 429
    if is_overloaded or (not status and (names & _TEMPORARY_NAMES or is_network)):
        said = text.lstrip(", ")  # gcsfs begins with a comma where the server has said nothing
        return StoreUnavailableError(url, f"the server returned {status}: {said}" if status else text)
    return StoreError(url, f"{type(error).__name__}: {text}")


def _first_line(error: BaseException) -> str:
    """First line of an error's text; Azure's have ten lines with identifiers and XML."""
    return str(error).strip().partition("\n")[0] or type(error).__name__


def _status(error: BaseException) -> int:
    """The HTTP status in an exception of botocore, aiohttp, gcsfs or azure; 0 if there is none."""
    response = getattr(error, "response", None)
    if isinstance(response, Mapping):  # botocore
        return int(response.get("ResponseMetadata", {}).get("HTTPStatusCode") or 0)
    for name in ("status", "status_code", "code"):
        if isinstance(value := getattr(error, name, None), int) and 100 <= value < 600:
            return value
    return 0


def _object_info(name: str, info: Mapping[str, Any]) -> ObjectInfo:
    size = int(info.get("size") or 0)
    return ObjectInfo(name, size, _version(info, size), modified_s=_modified_s(info))


def _version(info: Mapping[str, Any], size: int) -> str:
    """Identifier of the bytes: the store's own mark, else a digest of size and dates."""
    for field in _VERSION_FIELDS[:5]:
        if info.get(field):
            return str(info[field])
    rest = [str(info[field]) for field in (*_VERSION_FIELDS[5:], "created", "ino") if info.get(field)]
    return hashlib.blake2b("\0".join([str(size), *rest]).encode(), digest_size=16).hexdigest()


def _modified_s(info: Mapping[str, Any]) -> float:
    value = next((info[field] for field in _MODIFIED_FIELDS if info.get(field)), 0.0)
    if isinstance(value, datetime):
        return value.timestamp()
    return float(value) if isinstance(value, int | float) else 0.0
