"""Downloading the public data sets a recipe names.

Owns addresses, checksums, resuming and unpacking. Refuses to know what is inside. Invariant: the data folder appears
whole or not at all, and only from an archive whose checksum is right; a broken download goes on where it stopped.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import shutil
import tarfile
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from reconv.errors import DataError, ResourceError, UsageError

Progress = Callable[[int, int | None], None]  # bytes there, bytes in all if known

BASE_URL = "https://www.cs.toronto.edu/~kriz/"

_TIMEOUT_S = 60
_ATTEMPTS = 5  # without any progress in between
_BLOCK_BYTES = 1 << 18


@dataclass(frozen=True, slots=True)
class Archive:
    """A downloadable tar file, the folder it unpacks to, and the sizes of the files that matter there."""

    file: str
    md5: str
    folder: str
    sizes_bytes: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class Got:
    """Where the data is, and whether it had been there before."""

    path: Path
    already_there: bool


_CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")

ARCHIVES = {
    "cifar10": Archive(
        "cifar-10-binary.tar.gz",
        "c32a1d4ab5d03f1284b67883e8d87530",
        "cifar-10-batches-bin",
        dict.fromkeys(_CIFAR10_FILES, 30_730_000),
    ),
    "cifar100": Archive(
        "cifar-100-binary.tar.gz",
        "03b5dce01913d631647c71ecec9e9cb8",
        "cifar-100-binary",
        {"train.bin": 153_700_000, "test.bin": 30_740_000},
    ),
}


def get(name: str, folder: Path, progress: Progress | None = None, base_url: str | None = None) -> Got:
    """The named data set under `folder`, downloaded unless it is there."""
    if name not in ARCHIVES:
        raise UsageError(
            f"no data set called {name}", why=f"there are {', '.join(ARCHIVES)}", then="reconv data get cifar10"
        )
    return fetch_archive(ARCHIVES[name], folder, progress, base_url or BASE_URL)


def fetch_archive(archive: Archive, folder: Path, progress: Progress | None, base_url: str) -> Got:
    """Download, check and unpack one archive into `folder`."""
    final = folder / archive.folder
    if final.is_dir():
        _refuse_incomplete(archive, final)
        return Got(final, already_there=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{archive.file}.part"
        _download(urljoin(base_url.rstrip("/") + "/", archive.file), part, progress or _silent)
        _check(archive, part)
        _unpack(archive, part, final)
        part.unlink()
    except OSError as error:
        raise ResourceError(
            f"cannot write to {folder}",
            where=error.filename or str(folder),
            why=error.strerror or str(error),
            then="free some space or name a folder you may write to",
        ) from error
    return Got(final, already_there=False)


def _refuse_incomplete(archive: Archive, final: Path) -> None:
    for name, size in archive.sizes_bytes.items():
        file = final / name
        if not file.is_file() or file.stat().st_size != size:
            raise DataError(
                f"{final} is there, but {name} is {'of another size' if file.is_file() else 'missing'}",
                where=str(file),
                why="the folder is an incomplete copy; it was not downloaded by this command",
                then=f"remove it and type the same command again: rm -r {final}",
            )


def _download(url: str, part: Path, progress: Progress) -> None:
    """Bring `part` to its full length, going on from what is there, with new tries as long as they bring bytes."""
    failures = 0
    while True:
        before = part.stat().st_size if part.exists() else 0
        reason = _transfer(url, part, progress)
        if reason is None:
            return
        failures = 0 if part.exists() and part.stat().st_size > before else failures + 1
        if failures == _ATTEMPTS:
            raise DataError(
                f"download of {url} broke off",
                where=str(part),
                why=reason,
                then="type the same command again: it goes on where it stopped",
            )


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
            raise _refused(url, f"the server says {error.code} {error.reason}") from error
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


def _check(archive: Archive, part: Path) -> None:
    digest = hashlib.md5(usedforsecurity=False)
    with open(part, "rb") as file:
        while block := file.read(_BLOCK_BYTES):
            digest.update(block)
    if digest.hexdigest() != archive.md5:
        size = part.stat().st_size
        part.unlink()
        raise DataError(
            f"checksum of {archive.file} is wrong: {digest.hexdigest()} instead of {archive.md5} ({size:,} bytes)",
            where=str(part),
            why="the file was damaged on the way, or the server sent something else; it has been removed",
            then="type the same command again",
        )


def _unpack(archive: Archive, part: Path, final: Path) -> None:
    """Unpack beside the final place and rename, so that a half-unpacked folder is never taken for data."""
    room = final.with_name(f".{final.name}.unpacking")
    if room.exists():
        shutil.rmtree(room)
    try:
        with tarfile.open(part) as tar:
            tar.extractall(room, filter="data")
        inner = room / archive.folder
        if not inner.is_dir():
            raise DataError(f"{archive.file} has no folder {archive.folder}", where=str(part), why="another archive?")
        inner.rename(final)
    except tarfile.TarError as error:
        part.unlink()
        raise DataError(f"{archive.file} does not unpack", where=str(part), why=str(error)) from error
    finally:
        shutil.rmtree(room, ignore_errors=True)


def _refused(url: str, why: str) -> DataError:
    return DataError(f"cannot download {url}", where=url, why=why, then="check the address; a mirror: --base-url URL")


def _silent(there: int, total: int | None) -> None:
    """No progress is shown."""
