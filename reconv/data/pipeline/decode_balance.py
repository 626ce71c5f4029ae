"""How training images are shared between the host's workers and a device's JPEG engine.

Owns the measurement. Refuses to know runs and checkpoints, which keep what was found: the pixels of the two differ, so
a share may not change with the hour. Invariant: a share is a number of sixteenths from 1 to 15.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import numpy as np
import torch

from reconv.data.dataset import Dataset
from reconv.data.pipeline.gpu_decode import HANDED, HandOver
from reconv.data.pipeline.gpu_decoder import JpegDecoderDevice
from reconv.data.pipeline.sample_pipeline import Rows
from reconv.data.pipeline.thread_pool import cut_rows
from reconv.errors import DataError, RecipeError
from reconv.kernels.crop.ops import CropBox
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

_NUM_PICTURES = 64
_PARTS = 16
_TRIES = 2  # the first reads files and wakes everything up


def measured_share(
    source: Dataset,
    preprocess: PreprocessConfig,
    augment: AugmentConfig,
    engine: JpegDecoderDevice,
    workers: int,
    seed: int,
) -> float:
    """What the engine should make so that it and so many workers end at the same time."""
    num = min(_NUM_PICTURES, len(source))
    indices = np.arange(num, dtype=np.int64) * len(source) // num
    rows: dict[float, Rows] = {}

    def fill(share: float) -> None:
        fetch = HandOver(source, preprocess, augment, share)
        rows[share] = {column.name: column.empty(num) for column in fetch.columns}
        draws = fetch.draw(seed, np.arange(num))
        for row in (slice(number, number + 1) for number in range(num)):
            with suppress(DataError):  # a bad file is for the loader to tell, which may bear it
                fetch(indices[row], draws[row], cut_rows(rows[share], row))

    host_s, handing_s = (_fastest(lambda share=share: fill(share)) / workers for share in (0.0, 1.0))  # type: ignore[misc]
    handed = rows[1.0][HANDED].tolist()
    is_handed = [number for number, entry in enumerate(handed) if entry[0]]
    if not is_handed:
        raise RecipeError(
            "none of the images is for the GPU's JPEG engine",
            where=source.origin,
            why=f"of {num} looked at, none is a baseline JPEG file in colour that is smaller than a row of pixels",
            then="--set data.backend=processes",
        )
    images = rows[1.0]["images"]
    files = [torch.from_numpy(images[number].reshape(-1)[: int(handed[number][0])]) for number in is_handed]
    boxes: list[CropBox] = [tuple(handed[number][1:]) for number in is_handed]
    size, antialias = preprocess.size, augment.antialias
    engine_s = _fastest(lambda: engine.crops(files, boxes, size, antialias=antialias, is_cut=True))
    return balanced(host_s / num, handing_s / num, engine_s / num)


def balanced(host_s: float, handing_s: float, engine_s: float) -> float:
    """The share at which the workers' time, for their own rows and for handing over, is the engine's."""
    share = host_s / max(host_s - handing_s + engine_s, 1e-12)
    return min(max(round(share * _PARTS), 1), _PARTS - 1) / _PARTS


def _fastest(work: Callable[[], object]) -> float:
    taken_s = []
    for _ in range(_TRIES):
        began_s = time.perf_counter()
        work()
        taken_s.append(time.perf_counter() - began_s)
    return min(taken_s)
