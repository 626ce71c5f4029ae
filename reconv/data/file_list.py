"""Lists of many file names in little memory, and a digest of the files they name."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.data.dataset import at_most
from reconv.data.decode.pillow import INSTALL_HEIF, reads_heic
from reconv.storage import read_limits
from reconv.storage.local import size_bytes

MAX_SIZES = 4096  # files whose size goes into a digest: asking for a million sizes takes minutes on a network disk


class FileList:
    """A sequence of file names in 8 bytes each plus the name itself; names may be any bytes."""

    def __init__(self, names: Iterable[str]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for name in names:
            packed += os.fsencode(name)
            ends.append(len(packed))
        self._packed = np.frombuffer(packed, np.uint8)  # arrays, because worker processes can share them
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self._packed[self._ends[index] : self._ends[index + 1]].tobytes())

    def encoded(self, indices: npt.NDArray[np.int64]) -> list[bytes]:
        """The names at these indices, as bytes."""
        packed = self._packed.data
        bounds = zip(self._ends[indices].tolist(), self._ends[indices + 1].tolist(), strict=True)
        return [bytes(packed[start:end]) for start, end in bounds]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._packed.nbytes + self._ends.nbytes

    def content(self) -> tuple[memoryview, memoryview]:
        """The names as bytes, for a digest."""
        return self._packed.data, self._ends.data


def digest_files(
    class_names: tuple[str, ...], names: FileList, targets: npt.NDArray[np.integer], path: Callable[[int], str]
) -> str:
    """A digest of all names and targets, and of the sizes of up to 4096 files spread over the list."""
    digest = hashlib.blake2b("\0".join(class_names).encode("utf-8", "surrogateescape"), digest_size=16)
    for chunk in (*names.content(), targets.data):
        digest.update(chunk)
    for index in at_most(len(names), MAX_SIZES):
        digest.update(size_bytes(path(int(index))).to_bytes(8, "little"))
    return digest.hexdigest()


EXTENSIONS = ("jpg", "jpeg", "png", "webp", "bmp", "tif", "tiff", "gif")


HEIC_EXTENSIONS = ("heic", "heif")  # where pillow-heif is installed


_SUFFIXES = tuple(f".{extension}" for extension in EXTENSIONS)


_HEIC_SUFFIXES = tuple(f".{extension}" for extension in HEIC_EXTENSIONS)


def is_image_name(name: str) -> bool:
    """True if a file is an image by its extension."""
    return not name.startswith(".") and (
        name.lower().endswith(_SUFFIXES) or (name.lower().endswith(_HEIC_SUFFIXES) and reads_heic())
    )


def is_unread_heic(name: str) -> bool:
    """True if a file is a HEIC image by its extension, and cannot be read here."""
    return name.lower().endswith(_HEIC_SUFFIXES) and not name.startswith(".") and not reads_heic()


def describe_unread_heic(names: list[str]) -> str:
    """The HEIC images that are left out, and what reads them; empty if there are none."""
    if not names:
        return ""
    return (
        f"left out: {len(names):,} HEIC image{'s' * (len(names) > 1)} ({first_names(sorted(names), 3)}): {INSTALL_HEIF}"
    )


def walk_images(top: str | Path) -> list[str]:
    """The sorted paths of all images below a folder; links to folders are not followed.

    Raises `DataError` in a large tree that holds few images, such as the root of a disk.
    """
    found: list[str] = []
    num_entries = 0
    for folder, folders, files in os.walk(top):
        num_entries += len(folders) + len(files)
        found += [os.path.join(folder, name) for name in files if is_image_name(name)]
        if num_entries > read_limits.WALK_ENTRIES and len(found) < read_limits.WALK_IMAGES_FRACTION * num_entries:
            raise DataError(
                f"{top} is not a folder of images",
                where=str(top),
                why=f"of the first {num_entries:,} files and folders below it, {len(found):,} are images",
                hint="name the folder that holds the images",
            )
    return sorted(found)


def first_names(names: list[str], limit: int = 5) -> str:
    return ", ".join(names[:limit]) + (f" and {len(names) - limit} more" if len(names) > limit else "")
