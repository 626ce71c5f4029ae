"""ImageNet's original archives: ILSVRC2012_img_train.tar (with a tar per class inside) and ILSVRC2012_img_val.tar.

Nothing is unpacked: a sample is a range of bytes of an archive. Training samples are in the order of class, then file
name; validation samples in the order of file name.
"""

from __future__ import annotations

import hashlib
import tarfile
from array import array
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np

from reconv.core.errors import DataError
from reconv.data.dataset import Sample, Split
from reconv.data.readers.imagenet.labels import validation_synsets
from reconv.storage.local import ReadStream, read, size_bytes

TRAIN_FILE = "ILSVRC2012_img_train.tar"
VAL_FILE = "ILSVRC2012_img_val.tar"
COUNTS: Mapping[Split, int] = {"train": 1_281_167, "val": 50_000}


@dataclass(frozen=True, slots=True)
class _Member:
    name: str
    start: int
    length: int
    target: int


class ImageNetArchiveDataset:
    """One split of the archives; the index takes 20 bytes per sample plus the name."""

    kind = "archives"

    def __init__(self, path: Path, split: Split, class_names: tuple[str, ...], members: list[_Member]) -> None:
        self._path = path
        self._split = split
        self.class_names = class_names
        self.origin = f"the archive {path}"
        names = [member.name.encode("utf-8", "surrogateescape") for member in members]
        self._names = b"".join(names)
        self._ends = np.cumsum([0, *map(len, names)], dtype=np.int64)
        self._starts = np.frombuffer(array("q", (member.start for member in members)), np.int64)
        self._lengths = np.frombuffer(array("q", (member.length for member in members)), np.int64)
        self.targets = np.frombuffer(array("i", (member.target for member in members)), np.int32)

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        """The encoded image, read from the archive."""
        if not 0 <= index < len(self):
            raise IndexError(index)
        file = self._names[self._ends[index] : self._ends[index + 1]].decode("utf-8", "surrogateescape")
        target = int(self.targets[index])
        data = read(self._path, int(self._starts[index]), int(self._lengths[index]))
        return Sample(data, target, f"{self._split}/{self.class_names[target]}/{file}")

    def fingerprint(self) -> str:
        """A digest of names, offsets, targets and the archive's size."""
        digest = hashlib.blake2b("\0".join(self.class_names).encode("utf-8", "surrogateescape"), digest_size=16)
        for chunk in (self._names, self._ends.data, self._starts.data, self._lengths.data, self.targets.data):
            digest.update(chunk)
        digest.update(size_bytes(self._path).to_bytes(8, "little"))
        return digest.hexdigest()


def has_imagenet_archives(folder: Path) -> bool:
    """True if the folder holds the training archive."""
    return (folder / TRAIN_FILE).is_file()


def open_imagenet_archives(
    folder: Path, labels: Path | None, expected: Mapping[Split, int] | None
) -> dict[Split, ImageNetArchiveDataset]:
    """Both splits; `labels` is the file with the validation labels, `expected` the counts if not the published ones."""
    train, val = folder / TRAIN_FILE, folder / VAL_FILE
    if not val.is_file():
        raise DataError(
            f"no {VAL_FILE} in {folder}",
            where=str(folder),
            why=f"{TRAIN_FILE} is there, but both archives are needed",
            hint="put it there too (a link is enough)",
        )
    class_names, train_members = _train_members(train)
    counts = expected or COUNTS
    _check_count(train, len(train_members), counts.get("train"))
    files = _val_files(val)
    _check_count(val, len(files), counts.get("val"))
    val_members = _val_members(val, files, class_names, labels or folder)
    return {
        "train": ImageNetArchiveDataset(train, "train", class_names, train_members),
        "val": ImageNetArchiveDataset(val, "val", class_names, val_members),
    }


def _train_members(path: Path) -> tuple[tuple[str, ...], list[_Member]]:
    """Class names, and the files of the inner tars with their offsets in the outer archive."""
    inner = {
        PurePosixPath(name).stem: (start, length) for name, start, length in _entries(path) if name.endswith(".tar")
    }
    if not inner:
        raise _damaged(path, "it has no class archives such as n01440764.tar")
    class_names = tuple(sorted(inner))
    members: list[_Member] = []
    for target, class_name in enumerate(class_names):
        files = sorted(_entries(path, *inner[class_name]))
        if not files:
            raise _damaged(path, f"{class_name}.tar in it has no files")
        members += [_Member(PurePosixPath(name).name, start, length, target) for name, start, length in files]
    return class_names, members


def _val_files(path: Path) -> list[tuple[str, int, int]]:
    """The validation images sorted by name."""
    return sorted((PurePosixPath(name).name, start, length) for name, start, length in _entries(path))


def _val_members(
    path: Path, files: list[tuple[str, int, int]], class_names: tuple[str, ...], labels: Path
) -> list[_Member]:
    synsets = validation_synsets(labels, [name for name, _, _ in files], class_names)
    numbers = {name: number for number, name in enumerate(class_names)}
    return [_Member(name, start, length, numbers[synsets[name]]) for name, start, length in files]


def _entries(path: Path, offset: int = 0, length: int | None = None) -> list[tuple[str, int, int]]:
    """Name, offset and length of the files in the tar that starts at `offset` of the file."""
    end = size_bytes(path) if length is None else offset + length
    found: list[tuple[str, int, int]] = []
    try:
        file = ReadStream(path)
        file.seek(offset)
        with tarfile.open(fileobj=file, mode="r:") as tar:
            # Offsets are relative to the start of the file, not of the inner tar.
            while (member := tar.next()) is not None and member.offset < end:
                if member.isfile() and not PurePosixPath(member.name).name.startswith("."):
                    found.append((member.name, member.offset_data, member.size))
    except (tarfile.TarError, EOFError, ValueError, OverflowError, RecursionError) as error:
        raise _damaged(path, f"not a tar, or truncated: {error}") from error
    truncated = [name for name, start, size in found if start + size > end]
    if truncated:
        raise _damaged(path, f"it ends within {truncated[0]}")
    return found


def _check_count(path: Path, found: int, wanted: int | None) -> None:
    if wanted is not None and found != wanted:
        raise DataError(
            f"{path.name} has {found:,} images instead of {wanted:,}",
            where=str(path),
            why="the archive is truncated, or not the published one",
            hint="download it again; if the counts are intended: --expect TRAIN,VAL",
        )


def _damaged(path: Path, why: str) -> DataError:
    return DataError(f"cannot list {path.name}", where=str(path), why=why, hint="download the archive again")
