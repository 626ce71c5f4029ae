"""`RowReader`: from image files, bytes or pixels to uint8 rows, for training, evaluation, prediction and serving.

The compiled decoder gets the files of a task in a few calls, and reads those on local disks itself: row by row a
worker releases the GIL five times per image, and sleeps when another thread has it; of two processors that left a tenth
of one idle. With threads of the decoder's own, a task has more rows, and Python does little for each
(benchmarks/LOG.md). A row that it does not fill is filled alone, which says what is wrong with its image.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import numpy as np

from reconv.core.errors import DataError
from reconv.data.dataset import U8, Dataset, NamedArrays, sample_files, select_rows
from reconv.data.decode import native
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.host import ImageData, ImageView, Size
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

_NUM_FILES = 16  # that are looked at
_JPEG_SUFFIXES = (b".jpg", b".jpeg", b".jpe")
_BUFFER_BYTES = 16 * 2**20  # more than a task's ordinary photographs; a larger file is filled alone

Outcome = Size | DataError  # of filling a row: the size of its image, or why there is none


class Source(NamedTuple):
    """An image that was read: an encoded file or pixels, and its name for errors."""

    data: ImageData
    name: str


class RowSources(Protocol):
    """The images of rows."""

    def paths(self) -> Sequence[bytes] | None:
        """Paths of all of them if they are files on local disks, which the compiled decoder reads itself."""
        ...

    def read(self, row: int) -> Source:
        """The image of a row; raises `DataError` if it cannot be read."""
        ...


class _FileBuffer(threading.local):
    """Kept by each thread for its next task: fresh memory would be faulted in page by page."""

    def __init__(self) -> None:
        self.memory = np.empty(_BUFFER_BYTES, np.uint8)


_file_buffer = _FileBuffer()


@dataclass(frozen=True, slots=True)
class RowReader:
    """Fills rows with a view of their images; may be used by several threads."""

    view: ImageView
    is_native: bool  # the compiled decoder fills the rows that it supports

    def fill(self, sources: RowSources, params: NamedArrays, rows: U8, num_threads: int = 1) -> list[Outcome]:
        """Fill rows [n, channels, size, size]; a row whose outcome is an error has undefined pixels.

        `num_threads`: threads of the compiled decoder that all calls share; 1: a call decodes in its own.
        """
        outcomes: list[Outcome | None] = [None] * len(rows)
        images: dict[int, Source] = {}
        if self.is_native:
            paths = sources.paths()
            if paths is not None:
                self._fill_from_files(paths, params, rows, outcomes, num_threads)
            elif len(rows) > 1:
                images = self._fill_from_memory(sources, params, rows, outcomes, num_threads)
        return [
            self._fill_row(sources, images.get(row), row, select_rows(params, row), rows[row])
            if outcome is None
            else outcome
            for row, outcome in enumerate(outcomes)
        ]

    def _fill_from_files(
        self,
        paths: Sequence[bytes],
        params: NamedArrays,
        rows: U8,
        outcomes: list[Outcome | None],
        num_threads: int,
    ) -> None:
        first = 0
        while first < len(paths):
            began_s = time.perf_counter()
            ends, sizes = native.read_files(paths[first:], _file_buffer.memory)
            began_s = record_stage("disk", began_s)
            part = slice(first, first + len(ends))
            is_filled = native.crop_files(
                *(_file_buffer.memory, ends, self.view.boxes(sizes, select_rows(params, part)), rows[part]),
                interpolation=self.view.interpolation,
                antialias=self.view.antialias,
                crop_first=self.view.crop_first,
                num_threads=num_threads,
            )
            record_stage("decode", began_s)
            _note_sizes(outcomes, first, sizes, is_filled)
            first += max(1, len(ends))

    def _fill_from_memory(
        self,
        sources: RowSources,
        params: NamedArrays,
        rows: U8,
        outcomes: list[Outcome | None],
        num_threads: int,
    ) -> dict[int, Source]:
        """Read all images, and fill their rows if all are encoded; the images that were read."""
        images: dict[int, Source] = {}
        for row in range(len(rows)):
            try:
                images[row] = sources.read(row)
            except DataError as error:
                outcomes[row] = error
        encoded = [image.data for image in images.values() if isinstance(image.data, bytes)]
        if len(encoded) == len(rows):  # the rows of one array
            began_s = time.perf_counter()
            files = native.FilesInMemory(encoded)
            sizes = files.sizes()
            is_filled = files.crop_resize(
                self.view.boxes(sizes, params),
                rows,
                interpolation=self.view.interpolation,
                antialias=self.view.antialias,
                crop_first=self.view.crop_first,
                num_threads=num_threads,
            )
            record_stage("decode", began_s)
            _note_sizes(outcomes, 0, sizes, is_filled)
        return images

    def _fill_row(
        self, sources: RowSources, image: Source | None, row: int, params: NamedArrays, pixels: U8
    ) -> Outcome:
        try:
            data, name = image or sources.read(row)
            size = self.view.fill_natively(data, params, pixels) if self.is_native and isinstance(data, bytes) else None
            return size or self.view.fill(data, params, pixels, name)
        except DataError as error:
            return error


def _note_sizes(outcomes: list[Outcome | None], first: int, sizes: native.I32, is_filled: native.Bools) -> None:
    for row, (width, height) in enumerate(sizes.tolist()):
        if is_filled[row]:
            outcomes[first + row] = width, height


def has_jpeg_files(dataset: Dataset) -> bool:
    """True if the samples are local JPEG files that the compiled decoder supports, judging by some of them.

    Progressive files, for instance, are filled alone, which is slower in large tasks and in many threads.
    """
    indices = np.unique(np.linspace(0, max(0, len(dataset) - 1), _NUM_FILES).astype(np.int64))
    files = sample_files(dataset, indices[: len(dataset)])
    if files is None or not all(path.lower().endswith(_JPEG_SUFFIXES) for path in files[0]) or native.problem():
        return False
    _, sizes = native.read_files(files[0], _file_buffer.memory)
    return bool(2 * np.count_nonzero(sizes[:, 0]) >= len(sizes))


def can_crop_natively(preprocess: PreprocessConfig, augment: AugmentConfig) -> bool:
    """True if the compiled decoder makes the crops of training images."""
    is_native = augment.decoder == "native" and preprocess.interpolation in native.FILTERS
    return is_native and augment.crop == "random_resized" and preprocess.channels == 3
