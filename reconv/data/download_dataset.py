"""Downloading the public data sets a recipe names.

Owns addresses, checksums and unpacking. Refuses to know how bytes travel and what is inside. Invariant: the folder of
an archive appears whole or not at all, and only from an archive whose checksum is right.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from reconv.errors import DataError, ResourceError, UsageError
from reconv.io.download import Progress, digest, download, silent


@dataclass(frozen=True, slots=True)
class Archive:
    """A downloadable tar or zip file, the folder it unpacks to, and what must be there to call it complete."""

    file: str  # below the home of its data set
    md5: str
    folder: str
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)  # of the files that matter
    num_files: int | None = None

    @property
    def name(self) -> str:
        """The file without the folders it lies in on the server."""
        return PurePosixPath(self.file).name


@dataclass(frozen=True, slots=True)
class DataSet:
    """Archives of one home, unpacked side by side into a folder of their own, or straight into the one named."""

    home: str
    archives: tuple[Archive, ...]
    folder: str = ""


@dataclass(frozen=True, slots=True)
class Got:
    """Where the data is, and whether it had been there before."""

    path: Path
    already_there: bool


_CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")

_CIFAR_HOME = "https://www.cs.toronto.edu/~kriz/"

DATA_SETS = {
    "cifar10": DataSet(
        _CIFAR_HOME,
        (
            Archive(
                "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                "cifar-10-batches-bin",
                dict.fromkeys(_CIFAR10_FILES, 30_730_000),
            ),
        ),
    ),
    "cifar100": DataSet(
        _CIFAR_HOME,
        (
            Archive(
                "cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                "cifar-100-binary",
                {"train.bin": 153_700_000, "test.bin": 30_740_000},
            ),
        ),
    ),
    # The smallest first: whoever has no room for training images, some 37 GB while they are unpacked, learns it late
    # but keeps the rest.
    "coco2017": DataSet(
        "http://images.cocodataset.org/",  # its certificate is of another host; the checksums are what counts
        (
            Archive(
                "annotations/annotations_trainval2017.zip",
                "f4bbac642086de4f52a3fdda2de5fa2c",
                "annotations",
                num_files=6,
            ),
            Archive("zips/val2017.zip", "442b8da7639aecaf257c1dceb8ba8c80", "val2017", num_files=5_000),
            Archive("zips/train2017.zip", "cced6f7f71b7629ddf16f17bbcfab6b2", "train2017", num_files=118_287),
        ),
        "coco2017",
    ),
}


def get(name: str, folder: Path, progress: Progress | None = None, base_url: str | None = None) -> Got:
    """The named data set under `folder`, downloaded unless it is there."""
    if name not in DATA_SETS:
        raise UsageError(
            f"no data set called {name}", why=f"there are {', '.join(DATA_SETS)}", then="reconv data get cifar10"
        )
    return fetch_data_set(DATA_SETS[name], folder, progress, base_url)


def fetch_data_set(data_set: DataSet, folder: Path, progress: Progress | None, base_url: str | None = None) -> Got:
    """Every archive of a data set that is not there yet; the place is the folder that holds all of them."""
    home, inner = base_url or data_set.home, folder / data_set.folder
    got = [fetch_archive(archive, inner, progress, home) for archive in data_set.archives]
    place = got[0].path if len(got) == 1 else inner
    return Got(place, already_there=all(one.already_there for one in got))


def fetch_archive(archive: Archive, folder: Path, progress: Progress | None, base_url: str) -> Got:
    """Download, check and unpack one archive into `folder`."""
    final = folder / archive.folder
    if final.is_dir():
        _refuse_incomplete(archive, final)
        return Got(final, already_there=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{archive.name}.part"
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
    num_files = archive.num_files and sum(1 for entry in final.iterdir() if entry.is_file())
    if num_files != archive.num_files:
        raise DataError(
            f"{final} is there, but it holds {num_files:,} files instead of {archive.num_files:,}",
            where=str(final),
            why="the folder is an incomplete copy; it was not downloaded by this command",
            then=f"remove it and type the same command again: rm -r {final}",
        )


def _check(archive: Archive, part: Path) -> None:
    found = digest(part, "md5")
    if found != archive.md5:
        size = part.stat().st_size
        part.unlink()
        raise DataError(
            f"checksum of {archive.name} is wrong: {found} instead of {archive.md5} ({size:,} bytes)",
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
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(part) as zipped:
                zipped.extractall(room)
        else:
            with tarfile.open(part) as tar:
                tar.extractall(room, filter="data")
        inner = room / archive.folder
        if not inner.is_dir():
            raise DataError(f"{archive.name} has no folder {archive.folder}", where=str(part), why="another archive?")
        inner.rename(final)
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        part.unlink()
        raise DataError(f"{archive.name} does not unpack", where=str(part), why=str(error)) from error
    finally:
        shutil.rmtree(room, ignore_errors=True)
