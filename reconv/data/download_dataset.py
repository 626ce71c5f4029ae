"""Download the public datasets that recipes use.

The folder of an archive appears complete or not at all, and only from an archive whose checksum is right.
"""

from __future__ import annotations

import shutil
import tarfile
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from urllib.parse import urljoin

from reconv.core.errors import DataError, ResourceError, UsageError
from reconv.storage.download import Progress, digest, download, no_progress


@dataclass(frozen=True, slots=True)
class Archive:
    """A tar or zip file to download, the folder it unpacks to, and what a complete folder holds."""

    file: str  # relative to the dataset's URL
    md5: str
    folder: str
    sizes_bytes: Mapping[str, int] = field(default_factory=dict)  # of the files that are checked
    num_files: int | None = None

    @property
    def name(self) -> str:
        """The file name without the folders on the server."""
        return PurePosixPath(self.file).name


@dataclass(frozen=True, slots=True)
class DatasetArchives:
    """The archives of a dataset; they are unpacked side by side into `folder`."""

    base_url: str
    archives: tuple[Archive, ...]
    folder: str = ""  # empty: directly into the folder the user gave


@dataclass(frozen=True, slots=True)
class DownloadedDataset:
    """Folder of a downloaded dataset, with a flag if it was already there."""

    path: Path
    already_there: bool


_CIFAR10_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")

_CIFAR_URL = "https://www.cs.toronto.edu/~kriz/"

DATASETS = {
    "cifar10": DatasetArchives(
        _CIFAR_URL,
        (
            Archive(
                "cifar-10-binary.tar.gz",
                "c32a1d4ab5d03f1284b67883e8d87530",
                "cifar-10-batches-bin",
                dict.fromkeys(_CIFAR10_FILES, 30_730_000),
            ),
        ),
    ),
    "cifar100": DatasetArchives(
        _CIFAR_URL,
        (
            Archive(
                "cifar-100-binary.tar.gz",
                "03b5dce01913d631647c71ecec9e9cb8",
                "cifar-100-binary",
                {"train.bin": 153_700_000, "test.bin": 30_740_000},
            ),
        ),
    ),
    # The smallest first: without space for the training images, some 37 GB while unpacking, one still gets the rest.
    "coco2017": DatasetArchives(
        "http://images.cocodataset.org/",  # http, because its certificate is for another host; checksums are verified
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


def download_dataset(
    name: str, folder: Path, progress: Progress | None = None, base_url: str | None = None
) -> DownloadedDataset:
    """Download the named dataset into `folder`, unless it is there."""
    if name not in DATASETS:
        raise UsageError(
            f"unknown dataset {name}", why=f"known are {', '.join(DATASETS)}", hint="reconv data get cifar10"
        )
    return fetch_archives(DATASETS[name], folder, progress, base_url)


def fetch_archives(
    dataset: DatasetArchives, folder: Path, progress: Progress | None, base_url: str | None = None
) -> DownloadedDataset:
    """Fetch every archive that is not there yet; returns the folder that holds all of them."""
    url, inner = base_url or dataset.base_url, folder / dataset.folder
    fetched = [fetch_archive(archive, inner, progress, url) for archive in dataset.archives]
    path = fetched[0].path if len(fetched) == 1 else inner
    return DownloadedDataset(path, already_there=all(one.already_there for one in fetched))


def fetch_archive(archive: Archive, folder: Path, progress: Progress | None, base_url: str) -> DownloadedDataset:
    """Download, check and unpack one archive into `folder`."""
    final = folder / archive.folder
    if final.is_dir():
        _check_complete(archive, final)
        return DownloadedDataset(final, already_there=True)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f"{archive.name}.part"
        url = urljoin(base_url.rstrip("/") + "/", archive.file)
        mirror = "use a mirror: --base-url URL"
        # The checksum is verified below, so that plain http is safe.
        download(url, part, progress or no_progress, error=DataError, otherwise=mirror, allow_http=True)
        _verify_checksum(archive, part)
        _unpack(archive, part, final)
        part.unlink()
    except OSError as error:
        raise ResourceError(
            f"cannot write to {folder}",
            where=error.filename or str(folder),
            why=error.strerror or str(error),
            hint="free some space or choose a writable folder",
        ) from error
    return DownloadedDataset(final, already_there=False)


def _check_complete(archive: Archive, final: Path) -> None:
    for name, size in archive.sizes_bytes.items():
        file = final / name
        if not file.is_file() or file.stat().st_size != size:
            raise DataError(
                f"{final} exists, but {name} {'has another size' if file.is_file() else 'is missing'}",
                where=str(file),
                why="the folder is an incomplete copy that was not made by this command",
                hint=f"remove it and run the same command again: rm -r {final}",
            )
    num_files = archive.num_files and sum(1 for entry in final.iterdir() if entry.is_file())
    if num_files != archive.num_files:
        raise DataError(
            f"{final} exists, but it holds {num_files:,} files instead of {archive.num_files:,}",
            where=str(final),
            why="the folder is an incomplete copy that was not made by this command",
            hint=f"remove it and run the same command again: rm -r {final}",
        )


def _verify_checksum(archive: Archive, part: Path) -> None:
    found = digest(part, "md5")
    if found != archive.md5:
        size = part.stat().st_size
        part.unlink()
        raise DataError(
            f"wrong checksum of {archive.name}: {found} instead of {archive.md5} ({size:,} bytes)",
            where=str(part),
            why="the download was corrupted, or the server sent another file; it has been removed",
            hint="run the same command again",
        )


def _unpack(archive: Archive, part: Path, final: Path) -> None:
    """Unpack beside the final folder and rename, so that a half-unpacked folder is never taken for data."""
    unpacking = final.with_name(f".{final.name}.unpacking")
    if unpacking.exists():
        shutil.rmtree(unpacking)
    try:
        if archive.name.endswith(".zip"):
            with zipfile.ZipFile(part) as zipped:
                zipped.extractall(unpacking)
        else:
            with tarfile.open(part) as tar:
                tar.extractall(unpacking, filter="data")
        inner = unpacking / archive.folder
        if not inner.is_dir():
            raise DataError(
                f"{archive.name} has no folder {archive.folder}", where=str(part), why="it may be another archive"
            )
        inner.rename(final)
    except (tarfile.TarError, zipfile.BadZipFile) as error:
        part.unlink()
        raise DataError(f"cannot unpack {archive.name}", where=str(part), why=str(error)) from error
    finally:
        shutil.rmtree(unpacking, ignore_errors=True)
