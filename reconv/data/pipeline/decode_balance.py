"""Measures what fraction of the training images a GPU should decode so that it and the host's workers end together.

A run keeps the measured fraction for good: the pixels of the two decoders differ.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np

from reconv.core.errors import DataError, RecipeError
from reconv.data.dataset import Dataset, NamedArrays, select_rows
from reconv.data.pipeline.gpu_decode import ENCODED_BYTES, GpuDecodePipeline, JpegDecoderDevice, encoded_files
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

_NUM_IMAGES = 64
_STEPS = 16  # a fraction is a multiple of 1/16
_REPEATS = 2  # the first one reads files and warms everything up


def measure_gpu_decode_fraction(
    dataset: Dataset,
    preprocess: PreprocessConfig,
    augment: AugmentConfig,
    device: JpegDecoderDevice,
    num_workers: int,
    seed: int,
) -> float:
    """The fraction that the GPU should decode beside `num_workers` workers, from 1/16 to 15/16."""
    num = min(_NUM_IMAGES, len(dataset))
    indices = np.arange(num, dtype=np.int64) * len(dataset) // num
    filled: dict[float, NamedArrays] = {}

    def fill(fraction: float) -> None:
        pipeline = GpuDecodePipeline(dataset, preprocess, augment, fraction)
        filled[fraction] = {column.name: column.empty(num) for column in pipeline.columns}
        params = pipeline.params(seed, np.arange(num))
        for rows in (slice(row, row + 1) for row in range(num)):
            with suppress(DataError):  # the loader reports bad files, or tolerates them
                pipeline(indices[rows], select_rows(params, rows), select_rows(filled[fraction], rows))

    decode_s = _fastest(lambda: fill(0.0)) / num_workers
    read_s = _fastest(lambda: fill(1.0)) / num_workers
    on_gpu = np.flatnonzero(filled[1.0][ENCODED_BYTES])
    if not len(on_gpu):
        raise RecipeError(
            "the GPU's JPEG decoder supports none of the images",
            where=dataset.origin,
            why=f"of {num} examined, none is a baseline JPEG file in color that is smaller than its pixels",
            then="--set data.backend=processes",
        )
    files, boxes = encoded_files(filled[1.0], on_gpu)
    size, antialias = preprocess.size, augment.antialias
    gpu_s = _fastest(lambda: device.crops(files, boxes, size, antialias=antialias, is_cut=True))
    return balanced_fraction(decode_s / num, read_s / num, gpu_s / num)


def balanced_fraction(decode_s: float, read_s: float, gpu_s: float) -> float:
    """The fraction at which workers and GPU take equally long.

    Per image: `decode_s` for workers that decode it, `read_s` if they only read it for the GPU, `gpu_s` on the GPU.
    """
    fraction = decode_s / max(decode_s - read_s + gpu_s, 1e-12)
    return min(max(round(fraction * _STEPS), 1), _STEPS - 1) / _STEPS


def _fastest(work: Callable[[], object]) -> float:
    seconds = []
    for _ in range(_REPEATS):
        began_s = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began_s)
    return min(seconds)
