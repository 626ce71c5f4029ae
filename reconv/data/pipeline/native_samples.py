"""Rows of a task filled by the compiled decoder straight from image files, in a few calls for all of them.

A row that is not filled here goes through the row-by-row path, which reads the file again and reports what is wrong
with it. Row by row a worker releases the GIL five times per image, and sleeps when another thread has it; of two
processors that left a tenth of one idle. With threads of the decoder's own, a task has more rows, and Python does
little for each (benchmarks/LOG.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import U8, Dataset, NamedArrays, sample_files
from reconv.data.decode import native
from reconv.data.decode.pillow import MAX_PIXELS
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.geometry import CROP_AREA, CROP_POSITION, CROP_RATIO
from reconv.data.transforms.params import changes_images_on_host
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

_NUM_FILES = 16  # that are looked at
_JPEG_SUFFIXES = (b".jpg", b".jpeg", b".jpe")
_BUFFER_BYTES = 16 * 2**20  # more than a task's ordinary photographs; a larger file goes row by row


class _FileBuffer(threading.local):
    """Kept by each thread for its next task: fresh memory would be faulted in page by page."""

    def __init__(self) -> None:
        self.memory = np.empty(_BUFFER_BYTES, np.uint8)


_file_buffer = _FileBuffer()


def has_jpeg_files(dataset: Dataset) -> bool:
    """Whether the samples are local JPEG files that the compiled decoder supports, judging by some of them.

    Progressive files, for instance, go row by row, which is slower in large tasks and in many threads.
    """
    indices = np.unique(np.linspace(0, max(0, len(dataset) - 1), _NUM_FILES).astype(np.int64))
    files = sample_files(dataset, indices[: len(dataset)])
    if files is None or not all(path.lower().endswith(_JPEG_SUFFIXES) for path in files[0]) or native.problem():
        return False
    _, sizes = native.read_files(files[0], _file_buffer.memory)
    return bool(2 * np.count_nonzero(sizes[:, 0]) >= len(sizes))


def can_fill_from_files(preprocess: PreprocessConfig, augment: AugmentConfig) -> bool:
    """Whether the compiled decoder does all there is to do for a training image."""
    is_native = augment.decoder == "native" and preprocess.interpolation in native.FILTERS
    return (
        is_native
        and augment.crop == "random_resized"
        and preprocess.channels == 3
        and not changes_images_on_host(augment)
    )


def fill_from_files(
    paths: Sequence[bytes],
    preprocess: PreprocessConfig,
    augment: AugmentConfig,
    params: NamedArrays,
    images: U8,
    decode_threads: int = 1,
) -> npt.NDArray[np.bool_]:
    """Fill images [n, 3, size, size] from files; which rows were filled.

    More than one thread: all calls share so many threads of the decoder's own.
    """
    is_filled = np.zeros(len(paths), np.bool_)
    rule = native.CropRule(*augment.scale, *augment.ratio, augment.attempts, augment.fallback == "whole")
    first = 0
    while first < len(paths):
        began_s = time.perf_counter()
        ends, sizes = native.read_files(paths[first:], _file_buffer.memory)
        began_s = record_stage("disk", began_s)
        rows = slice(first, first + len(ends))
        areas, ratios, positions = (params[name][rows] for name in (CROP_AREA, CROP_RATIO, CROP_POSITION))
        boxes = native.crop_boxes(sizes, MAX_PIXELS, areas, ratios, positions, rule)
        is_filled[rows] = native.crop_files(
            *(_file_buffer.memory, ends, boxes, images[rows]),
            interpolation=preprocess.interpolation,
            antialias=augment.antialias,
            num_threads=decode_threads,
        )
        record_stage("decode", began_s)
        first += max(1, len(ends))
    return is_filled
