"""Images in files of their own, with the boxes of all of them in a table.

Owns the way from a table to a source. Refuses to know formats. Invariant: samples are in the order of the table; what
the recipe leaves out of it is said in the origin.
"""

from __future__ import annotations

import io
import os
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image

from reconv.data.boxes.annotations import NO_TARGET, Annotation, DetectionDataset
from reconv.data.boxes.box_table import BoxTable, settled
from reconv.data.dataset import I64, Sample, Split, evenly_spaced
from reconv.data.decode.decode import FORMATS
from reconv.data.storage.file_list import MAX_SIZES
from reconv.data.storage.local import read, size_bytes
from reconv.errors import DataError
from reconv.recipe.data_fields import DataConfig

_ORIENTATION = 0x0112
_ON_THEIR_SIDE = (5, 6, 7, 8)


class BoxTableDataset(DetectionDataset):
    """One split; `files` of the table are paths."""

    def __init__(self, kind: str, table: BoxTable, used: I64, origin: str, notes: tuple[str, ...] = ()) -> None:
        self.kind = kind
        self.table = table
        self.class_names = table.class_names
        self.class_ids = table.class_ids
        self.origin = "; ".join((origin, *notes))
        self.notes = notes
        self._used = used

    def __len__(self) -> int:
        return len(self._used)

    def path(self, index: int) -> str:
        """The image's file."""
        return self.table.files[int(self._used[index])]

    def __getitem__(self, index: int) -> Sample:
        """The encoded file with its boxes."""
        path = self.path(index)
        data = read(path)
        return Sample(data, NO_TARGET, path, self._annotation(index, data, path))

    def annotation(self, index: int) -> Annotation:
        """The boxes; where they are written as fractions, the image's size is looked up."""
        path = self.path(index)
        return self._annotation(index, read(path) if self.table.is_relative else b"", path)

    def _annotation(self, index: int, data: bytes, path: str) -> Annotation:
        size = upright_size(data, path) if self.table.is_relative else None
        return self.table.annotation(int(self._used[index]), size)

    def box_counts(self) -> I64:
        """How many boxes each image has."""
        counts: I64 = np.diff(self.table.offsets)[self._used]
        return counts

    def fingerprint(self) -> str:
        """A digest of names and boxes and of the sizes of up to 4096 files spread over the set."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        some = evenly_spaced(len(self), 100 * min(1, MAX_SIZES / len(self)))
        sizes = np.array([size_bytes(self.path(int(index))) for index in some])
        return f"{self.table.digest()}/{len(self)}/{int((sizes * (1 + np.arange(len(sizes)))).sum()):x}"


def open_box_table(
    kind: str, table: Callable[[], BoxTable], split: Split, data: DataConfig, title: str, why: str = ""
) -> BoxTableDataset:
    """A split by the recipe's policies."""
    kept, used, notes = settled(table(), data, split)
    return BoxTableDataset(kind, kept, used, title + (f" ({why})" if why else ""), notes)


def upright_size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of an encoded image, turned as its EXIF data say."""
    try:
        with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
            width, height = opened.size
            is_lying = opened.getexif().get(_ORIENTATION) in _ON_THEIR_SIDE
    except Exception as error:  # damaged bytes may raise anything in a decoder
        why = "it is no image, or its beginning is damaged"
        raise DataError("image does not decode", where=name, why=why, then="replace the file or remove it") from error
    return (width, height) if is_lying else (height, width)


def relative_to(root: str, path: str) -> str:
    """A path under a root, normalised, whatever slashes a file was written with."""
    return os.path.normpath(os.path.join(root, path.replace("\\", "/")))


def file_lines(path: str | Path) -> list[str]:
    """Names of files that a text lists, one a line; those that are no UTF-8 stay what the disk calls them."""
    return _lines(path, "surrogateescape")


def class_lines(path: str | Path) -> list[str]:
    """Names of classes that a text lists, one a line."""
    return _lines(path, "replace")


def _lines(path: str | Path, errors: str) -> list[str]:
    text = read(path).decode("utf-8-sig", errors)  # Windows' editors begin a text with a mark
    return [line.strip() for line in text.splitlines() if line.strip()]
