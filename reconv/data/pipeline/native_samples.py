"""Rows of a task filled by the compiled decoder straight from image files, in a few calls for all of them.

A row that is not filled here goes through the row-by-row path, which reads the file again and reports what is wrong
with it. Row by row a worker releases the GIL five times per image, and sleeps when another thread has it; of two
processors that left a tenth of one idle (docs/results/data.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import U8, NamedArrays
from reconv.data.decode import native
from reconv.data.decode.pillow import MAX_PIXELS
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.geometry import CROP_AREA, CROP_POSITION, CROP_RATIO
from reconv.data.transforms.params import changes_images_on_host
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

_BUFFER_BYTES = 4 * 2**20  # more than sixteen ordinary photographs; a larger file goes row by row


class _FileBuffer(threading.local):
    """Kept by each thread for its next task: fresh memory would be faulted in page by page."""

    def __init__(self) -> None:
        self.memory = np.empty(_BUFFER_BYTES, np.uint8)


_file_buffer = _FileBuffer()


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
    paths: Sequence[bytes], preprocess: PreprocessConfig, augment: AugmentConfig, params: NamedArrays, images: U8
) -> npt.NDArray[np.bool_]:
    """Fill images [n, 3, size, size] from files; which rows were filled."""
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
        )
        record_stage("decode", began_s)
        first += max(1, len(ends))
    return is_filled
