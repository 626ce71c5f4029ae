"""Rows of a task made by the compiled decoder straight from image files: two calls for all of them.

Owns the buffer that files are read into. Refuses to judge files: a row that is not made here is left to the way that
makes rows one by one, which reads the file again and says what is wrong with it. Invariant: a row made here has the
bytes that it would have by itself; how many rows a task has is not seen in them.

Row by row a worker gives the GIL up five times an image, and sleeps when another has it; of two
processors that left a tenth of one idle (docs/results/data.md).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import U8
from reconv.data.decode import native
from reconv.data.decode.decode import MAX_PIXELS
from reconv.data.pipeline.stage_timing import spent
from reconv.data.transforms.random_params import F64, is_recolouring, resized_box
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

_BUFFER_BYTES = 4 * 2**20  # more than sixteen ordinary photographs; a larger file is left to the other way


class _Kept(threading.local):
    """What a thread keeps for its next task: fresh memory would be faulted in page by page."""

    def __init__(self) -> None:
        self.buffer = np.empty(_BUFFER_BYTES, np.uint8)


_kept = _Kept()


def is_for_files(preprocess: PreprocessConfig, augment: AugmentConfig) -> bool:
    """Whether training rows are nothing but what the compiled decoder makes."""
    is_native = augment.decoder == "native" and preprocess.interpolation in native.FILTERS
    return is_native and augment.crop == "random_resized" and preprocess.channels == 3 and not is_recolouring(augment)


def fill_from_files(
    paths: Sequence[bytes], preprocess: PreprocessConfig, augment: AugmentConfig, draws: F64, images: U8
) -> npt.NDArray[np.bool_]:
    """Fill rows [n, 3, size, size] from files; which were made."""
    is_made = np.zeros(len(paths), np.bool_)
    first = 0
    while first < len(paths):
        began_s = time.perf_counter()
        ends, sizes = native.read_files(paths[first:], _kept.buffer)
        began_s = spent("disk", began_s)
        rows = slice(first, first + len(ends))
        boxes = np.zeros((len(ends), 4))
        for number, (width, height) in enumerate(sizes):
            if 0 < width * height <= MAX_PIXELS:
                boxes[number] = resized_box(width, height, draws[first + number], augment)
        is_made[rows] = native.crop_files(
            *(_kept.buffer, ends, boxes, images[rows]),
            interpolation=preprocess.interpolation,
            antialias=augment.antialias,
        )
        spent("decode", began_s)
        first += max(1, len(ends))
    return is_made
