"""The interface of a store, and which one serves an address: `s3://`, `gs://`, `az://`, `https://`."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol
from urllib.parse import SplitResult, quote, urlsplit

from reconv.core.errors import UsageError

# Scheme -> the extra that installs its package; empty if nothing else is needed.
SCHEMES = {"s3": "s3", "gs": "gcs", "az": "azure", "https": "", "http": "", "file": "", "memory": ""}
_URL = re.compile(rf"({'|'.join(SCHEMES)}):(?:/(/?)(.*))?", re.DOTALL)  # `Path("s3://")` is s3:
ADDRESS = re.compile(rf"({'|'.join((*SCHEMES, 'hf'))}):/(.*)", re.DOTALL)  # also of a Hub
_BUCKET = re.compile(r"[A-Za-z0-9$][A-Za-z0-9._:$-]*")  # colons: the ARN of an access point
_HOST = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9a-fA-F:.]+\])(?::\d{1,5})?")
_WEB = ("https", "http")
_URL_CHARACTERS = ":/[]%!$&'()*+,;=@~"  # that are not quoted in an address: it may be quoted already
MAX_NAME_BYTES = 1024  # of S3, Google Cloud Storage and Azure
_MAX_PART_BYTES = 255  # of a file name
MAX_OBJECT_BYTES = 1 << 44  # 16 TiB, the largest file of ext4


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """An object: its name below the store's root, its size, and what identifies its version."""

    name: str
    num_bytes: int
    etag: str
    crc32c: int | None = None  # of the whole object, where an index has it
    modified_s: float = 0.0


class ObjectStore(Protocol):
    """The objects below an address. Methods may be called from any thread; they do not wait for a store that fails."""

    root: str

    def list(self) -> list[ObjectInfo]:
        """All objects, sorted by name; raises `StoreError` if the store has no listings."""
        ...

    def info(self, name: str) -> ObjectInfo:
        """Size and version of an object."""
        ...

    def read(self, item: ObjectInfo, start: int, length: int) -> bytes:
        """Exactly `length` bytes of this version of the object, or `ChangedObjectError`."""
        ...

    def write(self, name: str, content: bytes | Path) -> None:
        """Create or replace an object from bytes or from a file."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object; one that is missing is no error."""
        ...


def is_url(text: object) -> bool:
    """True if a text or path is an address in a store."""
    return _URL.fullmatch(str(text)) is not None


def is_address(text: object) -> bool:
    """True if reading from this path asks a server, or reads a `file:` address."""
    return ADDRESS.fullmatch(str(text)) is not None


def as_url(text: object) -> str:
    """The address without a slash at its end; a `Path` has lost one of its slashes."""
    match = _URL.fullmatch(str(text))
    if match is None:
        raise UsageError(f"not the address of a store: {text}", hint=f"use one of {', '.join(SCHEMES)}://...")
    scheme, second, rest = match.groups(default="")
    rest = f"/{rest}" if scheme == "file" and not second else rest
    rest = rest.rstrip("/")
    if scheme not in ("file", "memory"):
        _check_address(scheme, rest)
    if scheme in _WEB:
        split_url(f"{scheme}://{rest.partition('/')[0]}")
    return f"{scheme}://{rest}"


def _check_address(scheme: str, rest: str) -> None:
    """Refuse addresses without a bucket or host, and those that would name something else than they seem to."""
    place, *parts = rest.split("/")
    path = "/".join(parts)
    why = ""
    if scheme in _WEB and "@" in place:
        place, why = place.rpartition("@")[2], "it has a user name or password before the host"
    elif (_HOST if scheme in _WEB else _BUCKET).fullmatch(place) is None:
        why = "it has no host" if scheme in _WEB else "it has no bucket, or one with characters that no bucket has"
    elif re.search(r"[?#\x00-\x1f\x7f]", path):
        path = re.split(r"[?#\x00-\x1f\x7f]", path)[0]  # what follows may be a signature
        why = "it has a question mark, '#' or a control character in its path"
    elif any(part in ("", ".", "..") for part in parts):
        why = "a part of its path is empty, '.' or '..'"
    elif len(path.encode("utf-8", "surrogateescape")) > MAX_NAME_BYTES:
        path, why = f"{path[:40]}...", f"its path has more than {MAX_NAME_BYTES} bytes"
    if why:
        url = f"{scheme}://{place}/{path}".rstrip("/")
        form = "https://HOST/PATH" if scheme in _WEB else f"{scheme}://BUCKET/PATH"
        raise UsageError(f"not the address of a dataset or run: {url}", why=why, hint=f"write it as {form}")


def split_url(url: str) -> SplitResult:
    """The parts of a web address; raises UsageError if it is none."""
    try:
        parts = urlsplit(url)
        _ = parts.port
        if not parts.hostname or re.search(r"[\s\x00-\x1f\x7f]", parts.netloc):
            raise ValueError("it has no host, or a blank in it")
    except ValueError as error:
        raise UsageError(f"not a web address: {url}", why=str(error), hint="write it as https://HOST/PATH") from error
    return parts


def local_folder(url: str, runs: Path) -> Path:
    """The run directory on this machine for the copy at an address."""
    scheme, _, rest = url.partition("://")
    return runs / scheme / rest.strip("/")


def join_url(root: str, name: str) -> str:
    """The address of an object below a root."""
    return f"{root}/{name}"


def quoted_url(root: str, name: str) -> str:
    """The same for a web server."""
    return f"{quote(root, safe=_URL_CHARACTERS)}/{quote(name, errors='surrogateescape')}"


def check_name(root: str, name: str) -> None:
    """Refuse names that cannot be files below a folder."""
    parts = name.split("/")
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in parts]
    is_wrong = any(part in ("", ".", "..") for part in parts) or "\0" in name
    if is_wrong or max(sizes) > _MAX_PART_BYTES or sum(sizes) + len(sizes) - 1 > MAX_NAME_BYTES:
        raise UsageError(f"an object has a name that cannot be read: {name!r:.100}", where=root, hint="rename it")


def open_object_store(url: str) -> ObjectStore:
    """The store that serves an address; imports the package for its scheme."""
    url = as_url(url)
    scheme = urlsplit(url).scheme
    if scheme in _WEB:
        from reconv.storage.object_stores.http import HttpStore

        return HttpStore(url)
    if scheme == "s3":
        from reconv.storage.object_stores.s3 import S3Store

        return S3Store(url)
    if scheme == "gs":
        from reconv.storage.object_stores.gcs import GcsStore

        return GcsStore(url)
    if scheme == "az":
        from reconv.storage.object_stores.azure import AzureStore

        return AzureStore(url)
    from reconv.storage.object_stores.fsspec import FsspecStore

    return FsspecStore(url)
