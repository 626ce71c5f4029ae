"""The images that show the ranges of activations before a model is quantized to int8."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np

from reconv.errors import DataError, UsageError
from reconv.inference.eval_data import open_eval_set
from reconv.inference.export.int8 import U8
from reconv.inference.image_input import ImageFile, ImageInput
from reconv.inference.predict_files import image_files
from reconv.inference.predictor import Predictor
from reconv.random import key, permutation

NUM_IMAGES = 256
BATCH_SIZE = 16


def calibration_batches(
    predictor: Predictor, images: str | Path | None, data: str | Path | None, batch: int | None
) -> list[U8]:
    """Batches [n, size, size, channels] of images of a folder, else of the training split of `data` or of the run.

    256 images are drawn, the same ones every time. `batch` is the batch size of a model that has a fixed one.
    """
    pixels = []
    for image in _draw(predictor, images, data):
        try:
            pixels.append(predictor.read(image).pixels.permute(1, 2, 0).numpy())
        except DataError:
            continue
    size = batch or BATCH_SIZE
    batches = [np.stack(pixels[start : start + size]) for start in range(0, len(pixels), size)]
    if batch is not None and batches and len(batches[-1]) < batch:
        batches.pop()
    if not batches:
        raise DataError(
            "there are no calibration images that can be read",
            where=str(images or data or ""),
            why=f"int8 with a fixed batch size needs at least {batch}" if batch else "int8 needs some",
            then="give a folder of typical images: --calibration DIR",
        )
    return batches


def _draw(predictor: Predictor, images: str | Path | None, data: str | Path | None) -> Iterator[ImageInput]:
    if images is not None:
        files = list(image_files(Path(images)))
        yield from (ImageFile(files[index].path) for index in _indices(len(files)))
        return
    try:
        train = open_eval_set(predictor.recipe, predictor.model_classes, data, "train")
    except (DataError, UsageError) as error:
        raise type(error)(
            f"int8 needs training images to calibrate: {error.what}",
            where=error.where,
            why=error.why,
            then=f"{error.then + ', or ' if error.then else ''}give other images: --calibration DIR",
        ) from error
    yield from (train[int(index)].data for index in _indices(len(train)))


def _indices(length: int) -> list[int]:
    return sorted(permutation(key(0, "calibration"), length)[:NUM_IMAGES].tolist())
