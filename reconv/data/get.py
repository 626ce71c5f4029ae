"""Downloading the public data sets a recipe names.

Owns addresses, checksums and unpacking. Refuses to know how bytes travel and what is inside. Invariant: the data
folder appears whole or not at all, and only from an archive whose checksum is right.
"""

from __future__ import annotations

import shutil
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from reconv.download import Progress, digest, download, silent
from reconv.errors import DataError, ResourceError, UsageError

BASE_URL = "https://www.cs.toronto.edu/~kriz/"


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
        url = urljoin(base_url.rstrip("/") + "/", archive.file)
        download(url, part, progress or silent, error=DataError, otherwise="name a mirror: --base-url URL")
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


def _check(archive: Archive, part: Path) -> None:
    found = digest(part, "md5")
    if found != archive.md5:
        size = part.stat().st_size
        part.unlink()
        raise DataError(
            f"checksum of {archive.file} is wrong: {found} instead of {archive.md5} ({size:,} bytes)",
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
