"""Training images that live on the device and are cropped there; the crops are the host's, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from itertools import takewhile

import numpy as np
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import RecipeError
from reconv.data.dataset import I64, Dataset, NamedArrays
from reconv.data.pipeline.batch_assembler import BatchAssembler
from reconv.data.pipeline.samples import preprocessed_images
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.transforms.geometry import CROP_CORNER, crop_params
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

_STEPS_PER_TRANSFER = 16
_CROP_PIXELS = "crop_pixels"


class PreloadedLoader:
    """Crops preloaded images on the device; the parameters of several steps are transferred and processed at once.

    A step of small images is as short as the host can launch it: transferring parameters step by step took a fifth
    of it.
    """

    def __init__(self, dataset: Dataset, assembler: BatchAssembler, move: Callable[[Tensor], Tensor]) -> None:
        self._dataset = dataset
        self._assembler = assembler
        self._move = move
        self._images = lru_cache(maxsize=1)(self._preload)

    def _preload(self, size: int) -> PreloadedImages:
        return PreloadedImages(self._dataset, self._assembler.preprocess(size), self._assembler.augment, self._move)

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        while start < stop:
            size = self._assembler.size_at(start)
            candidates = range(start, min(start + _STEPS_PER_TRANSFER, stop))
            steps = list(takewhile(lambda step: self._assembler.size_at(step) == size, candidates))  # noqa: B023
            yield from self._steps_of_size(steps, size)
            start += len(steps)

    def _steps_of_size(self, steps: Sequence[int], size: int) -> Iterator[tuple[Batch, ...]]:
        assembler, images = self._assembler, self._images(size)
        positions = np.concatenate([assembler.positions(step) for step in steps])
        indices = assembler.sampler.indices_of(positions)
        params = crop_params(assembler.augment, assembler.seed, positions)
        tensors = images.to_crop(indices, params) | assembler.device_params(positions, indices, size)
        moved = images.locate_crops(Batch(tensors, torch.from_numpy(positions), (len(positions),)).map(self._move))
        num_rows = len(positions) // len(steps)
        for number, step in enumerate(steps):
            rows = slice(number * num_rows, (number + 1) * num_rows)
            batch = Batch({name: t[rows] for name, t in moved.tensors.items()}, moved.positions[rows], (num_rows,))
            micro_batches = assembler.micro_batches(step, positions[rows], batch, size)
            yield tuple(images.crop(part.map(self._move)) for part in micro_batches)


class PreloadedImages:
    """All training images on the device, in the order of the dataset."""

    def __init__(
        self, dataset: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig, move: Callable[[Tensor], Tensor]
    ) -> None:
        images = preprocessed_images(dataset, preprocess, augment)
        if images is None or not isinstance(dataset, ArrayDataset):
            raise RecipeError(
                "these training images cannot stay on the device",
                where="data.preload",
                why="only datasets held in memory can (digits, CIFAR), with augment.crop none or pad, and without "
                "color jitter or a policy on the host",
                hint="--set data.preload=off",
            )
        self._size = preprocess.size
        # In channels-last order a crop gathers whole pixels, and has the layout that convolutions prefer.
        self._images = move(torch.from_numpy(images)).permute(0, 2, 3, 1).contiguous()
        self._targets = torch.from_numpy(dataset.targets)
        self._pad = augment.padding if augment.crop == "random" else 0
        self._is_black = augment.padding_mode == "constant"
        self._along = move(torch.arange(-self._pad, self._size - self._pad))

    def to_crop(self, indices: I64, params: NamedArrays) -> dict[str, Tensor]:
        """Arguments of `locate_crops` for some rows, on the host."""
        rows = torch.from_numpy(indices)
        tensors = {"targets": self._targets[rows], "indices": rows}
        if self._pad:
            tensors[CROP_CORNER] = torch.from_numpy(params[CROP_CORNER])
        return tensors

    def locate_crops(self, batch: Batch) -> Batch:
        """The batch with the rows and columns of each crop [n, 2, size] instead of its corner; all on the device.

        They are those of the unpadded image; the padding is not stored, and its pixels are reflected ones or 0.
        """
        if not self._pad:
            return batch
        tensors = dict(batch.tensors)
        at = tensors.pop(CROP_CORNER)[:, :, None] + self._along
        last = self._size - 1  # reflected at the first and at the last pixel
        tensors[_CROP_PIXELS] = at if self._is_black else last - (last - at.abs()).abs()
        return Batch(tensors, batch.positions, batch.groups)

    def crop(self, batch: Batch) -> Batch:
        """The batch with images instead of the places of their crops; all on the device."""
        tensors = dict(batch.tensors)
        if not self._pad:
            images = self._images[tensors["indices"]]
        else:
            images = self._padded_crops(tensors["indices"], tensors.pop(_CROP_PIXELS))
        images = images.permute(0, 3, 1, 2)
        if images.shape[1] == 1:
            # With one channel both memory formats hold the same bytes and torch keeps whichever strides it is given,
            # but the convolution for channels last gives other bits.
            images = images.reshape(-1).view(images.shape)
        return Batch({**tensors, "images": images}, batch.positions, batch.groups)

    def _padded_crops(self, indices: Tensor, at: Tensor) -> Tensor:
        """Crops [n, size, size, channels] of the pixels at these rows and columns."""
        last = self._size - 1
        inside = at.clamp(0, last) if self._is_black else at  # a black one may be read from anywhere
        rows, columns = inside[:, 0, :, None], inside[:, 1, None, :]
        images = self._images[indices[:, None, None], rows, columns]
        if not self._is_black:
            return images
        outside = (at < 0) | (at > last)
        return images.masked_fill((outside[:, 0, :, None] | outside[:, 1, None, :])[..., None], 0)
