"""The images that show the ranges of activations before a model is quantized to int8, and those that judge it."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from reconv.build.saved_model import ModelClasses
from reconv.core.errors import DataError, UsageError
from reconv.core.random import key, permutation
from reconv.data.dataset import Split
from reconv.detection.annotation import Annotation
from reconv.inference.backends.base import U8
from reconv.inference.image_input import ImageFile, ImageInput, image_files
from reconv.inference.image_reader import ImageReader
from reconv.recipe.schema import Recipe

NUM_IMAGES = 256
NUM_HELD_OUT = 512  # images that judge a model, where there are as many
MIN_IMAGES = 32  # of a folder that calibrates and judges
BATCH_SIZE = 16


@dataclass(frozen=True, slots=True)
class HeldOutImages:
    """Images that do not calibrate, and what is known of them."""

    pixels: Tensor  # uint8 [n, channels, size, size]
    targets: Sequence[int] | None  # class indices; None: not known
    annotations: Sequence[Annotation] | None  # of detectors: the boxes


@dataclass(frozen=True, slots=True)
class CalibrationSource:
    """Source of a model's calibration images: a folder, else the training split of `data` or of its run."""

    recipe: Recipe
    classes: ModelClasses
    read: ImageReader
    folder: str | Path | None = None
    data: str | Path | None = None

    def batches(self, batch: int | None = None, *, hold_out: bool = False) -> list[U8]:
        """Batches [n, size, size, channels] of 256 images that are drawn, the same ones every time.

        `batch` is the batch size of a model that has a fixed one. With `hold_out`, half of a small folder is left to
        judge with.
        """
        if self.folder is None:
            drawn = self._draw_dataset("train", NUM_IMAGES)
        elif hold_out:
            drawn = self._folder_parts()[0]
        else:
            files = image_files(Path(self.folder))
            drawn = (_Item(ImageFile(files[index].path)) for index in _indices(len(files), NUM_IMAGES))
        pixels = [pixels.transpose(1, 2, 0) for pixels, _ in self._read(drawn)]
        size = batch or BATCH_SIZE
        batches = [np.stack(pixels[start : start + size]) for start in range(0, len(pixels), size)]
        if batch is not None and batches and len(batches[-1]) < batch:
            batches.pop()
        if not batches:
            raise DataError(
                "there are no calibration images that can be read",
                where=str(self.folder or self.data or ""),
                why=f"int8 with a fixed batch size needs at least {batch}" if batch else "int8 needs some",
                hint="give a folder of typical images: --calibration DIR",
            )
        return batches

    def held_out(self) -> HeldOutImages:
        """Up to 512 images: validation images with their classes or boxes; without them, others of the folder."""
        try:
            found = list(self._read(self._draw_dataset("val", NUM_HELD_OUT)))
        except (DataError, UsageError):
            if self.folder is None or self.recipe.task == "detection":  # boxes must be known
                raise
            found = list(self._read(self._folder_parts()[1]))
        if not found:
            raise DataError("there are no images that can be read to judge int8 with", where=str(self.folder or ""))
        pixels = torch.from_numpy(np.stack([pixels for pixels, _ in found]))
        annotations = [item.annotation for _, item in found if item.annotation is not None]
        targets = [item.target for _, item in found if item.target is not None]
        return HeldOutImages(pixels, targets or None, annotations or None)

    def identity(self) -> str:
        """Key of a cached int8 model: the run's own data is known by its fingerprint, and is not opened."""
        if self.folder is None:
            return f"data {self.data or self.recipe.data.path} {sorted(self.classes.data_fingerprint.items())}"
        digest = hashlib.sha256()
        for file in image_files(Path(self.folder)):
            found = os.stat(file.path)
            digest.update(f"{file.path.name} {found.st_size} {found.st_mtime_ns}\n".encode(errors="surrogateescape"))
        return f"folder {digest.hexdigest()}"

    def _folder_parts(self) -> tuple[Iterator[_Item], Iterator[_Item]]:
        """Images of the folder to calibrate, and others to judge."""
        assert self.folder is not None
        files = image_files(Path(self.folder))
        if len(files) < MIN_IMAGES:
            raise DataError(
                f"int8 needs at least {MIN_IMAGES} images to calibrate and to judge it",
                where=str(self.folder),
                why=f"there are {len(files)}",
                hint="give a folder of typical images: --calibration DIR",
            )
        order = permutation(key(0, "calibration"), len(files))
        num = min(NUM_IMAGES, len(files) // 2)
        parts = (np.sort(order[:num]), np.sort(order[num : num + NUM_HELD_OUT]))
        first, second = ((_Item(ImageFile(files[index].path)) for index in part) for part in parts)
        return first, second

    def _draw_dataset(self, split: Split, number: int) -> Iterator[_Item]:
        try:
            from reconv.inference.eval_data import open_eval_set

            dataset = open_eval_set(self.recipe, self.classes, self.data, split)
        except (DataError, UsageError) as error:
            what = "training images to calibrate" if split == "train" else "validation images to be judged"
            raise type(error)(
                f"int8 needs {what}: {error.what}",
                where=error.where,
                why=error.why,
                hint="give a folder of typical images: --calibration DIR",
            ) from error
        for index in _indices(len(dataset), number):
            sample = dataset[index]
            is_single = sample.labels is None and sample.annotation is None
            yield _Item(sample.data, sample.target if is_single else None, sample.annotation)

    def _read(self, items: Iterator[_Item]) -> Iterator[tuple[U8, _Item]]:
        """The pixels [channels, size, size] of those that can be read."""
        for item in items:
            try:
                yield self.read(item.image).pixels.numpy(), item
            except DataError:
                continue


@dataclass(frozen=True, slots=True)
class _Item:
    image: ImageInput
    target: int | None = None
    annotation: Annotation | None = None


def _indices(length: int, number: int) -> list[int]:
    found: list[int] = sorted(permutation(key(0, "calibration"), length)[:number].tolist())
    return found
