"""Datasets of image files whose boxes are in a `BoxTable`, and helpers to read annotation files."""

from __future__ import annotations

import io
import os
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
from PIL import Image, UnidentifiedImageError

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import NO_TARGET, DetectionDataset
from reconv.data.boxes.table import BoxTable, apply_box_policies
from reconv.data.dataset import I64, Sample, Split, at_most
from reconv.data.decode.pillow import formats_of, unidentified
from reconv.data.file_list import MAX_SIZES
from reconv.data.readers.validation_split import ValidationSplit
from reconv.detection.annotation import Annotation
from reconv.recipe.parts.data import DataConfig
from reconv.storage import read_limits
from reconv.storage.local import read, read_bounded_text, size_bytes

_EXIF_ORIENTATION = 0x0112
_ROTATED_BY_90 = (5, 6, 7, 8)


class BoxTableDataset(DetectionDataset):
    """One split whose images are files and whose boxes are in a table."""

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
        """The encoded image with its boxes."""
        path = self.path(index)
        data = read(path)
        return Sample(data, NO_TARGET, path, self._annotation(index, data, path))

    def annotation(self, index: int) -> Annotation:
        """The boxes; relative ones need the size from the image's header."""
        path = self.path(index)
        return self._annotation(index, read(path) if self.table.is_relative else b"", path)

    def _annotation(self, index: int, data: bytes, path: str) -> Annotation:
        size = upright_size(data, path) if self.table.is_relative else None
        return self.table.annotation(int(self._used[index]), size)

    def box_counts(self) -> I64:
        """The number of boxes of each image."""
        counts: I64 = np.diff(self.table.offsets)[self._used]
        return counts

    def fingerprint(self) -> str:
        """A digest of names and boxes, and of the sizes of up to 4096 files."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        some = at_most(len(self), MAX_SIZES)
        sizes = np.array([size_bytes(self.path(int(index))) for index in some])
        return f"{self.table.digest()}/{len(self)}/{int((sizes * (1 + np.arange(len(sizes)))).sum()):x}"


def open_box_table(
    kind: str, table: BoxTable, split: Split, data: DataConfig, title: str, why: str = ""
) -> BoxTableDataset:
    """The dataset of a table after the recipe's policies."""
    kept, used, notes = apply_box_policies(table, data, split)
    origin = title + (f" ({why})" if why else "") + (f"; {table.note}" if table.note else "")
    return BoxTableDataset(kind, kept, used, origin, notes)


def hold_out(table: BoxTable, root: Path, split: Split, data: DataConfig) -> BoxTable:
    """The images of one split of a table that has both, by the hash of their paths."""
    paths = [os.path.relpath(table.files[index], root) for index in range(len(table))]
    kept, note = ValidationSplit.of(data).select(split, paths, None, str(root))
    return replace(table.keep_images(kept), note=note)


def upright_size(data: bytes, name: str) -> tuple[int, int]:
    """Height and width of an encoded image with its EXIF orientation applied."""
    try:
        with Image.open(io.BytesIO(data), formats=formats_of(data, name)) as opened:
            width, height = opened.size
            is_rotated = opened.getexif().get(_EXIF_ORIENTATION) in _ROTATED_BY_90
    except DataError:
        raise
    except UnidentifiedImageError as error:
        raise unidentified(data, name) from error
    except Exception as error:  # a decoder may raise anything for damaged bytes
        why = "its header is damaged"
        raise DataError("image does not decode", where=name, why=why, hint="replace or remove the file") from error
    return (width, height) if is_rotated else (height, width)


def resolve_path(root: str, path: str) -> str:
    """A path relative to a root, normalized; annotation files may use backslashes."""
    return os.path.normpath(os.path.join(root, path.replace("\\", "/")))


def read_file_names(path: str | Path) -> list[str]:
    """File names from a text file, one per line; names may be any bytes."""
    return _read_lines(path, "surrogateescape", read_limits.TABLE_BYTES)


def read_class_names(path: str | Path) -> list[str]:
    """Class names from a text file, one per line."""
    return _read_lines(path, "replace", read_limits.NAMES_BYTES)


def _read_lines(path: str | Path, errors: str, max_bytes: int) -> list[str]:
    text = read_bounded_text(path, max_bytes).decode("utf-8-sig", errors)  # some editors write a byte order mark
    return [line.strip() for line in text.splitlines() if line.strip()]
