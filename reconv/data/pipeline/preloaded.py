"""Training images that live on the device, cropped there by tensor operations.

Owns the moved array and the crop. Refuses to know order, draws and flips. Invariant: the crops are the bytes that the
host would have made from the same draws.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.data.dataset import I64, Dataset
from reconv.data.pipeline.sample_pipeline import ready_array
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.transforms.random_params import F64, crop_corners
from reconv.errors import RecipeError
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

_CORNERS = "corners"


class PreloadedImages:
    """All training images on the device, in the order of the data set."""

    def __init__(
        self, source: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig, move: Callable[[Tensor], Tensor]
    ) -> None:
        ready = ready_array(source, preprocess, augment)
        if ready is None or not isinstance(source, ArrayDataset):
            raise RecipeError(
                "these training images cannot stay on the device",
                where="data.preload",
                why="only data sets held in memory can (digits, CIFAR), with augment.crop none or pad, no colours and "
                "no policy",
                then="--set data.preload=off",
            )
        self.size = preprocess.size
        # With channels last a crop gathers whole pixels and comes out as convolutions like it.
        self._images = move(torch.from_numpy(ready)).permute(0, 2, 3, 1).contiguous()
        self._targets = torch.from_numpy(source.targets)
        self._pad = augment.padding if augment.crop == "random" else 0
        self._is_black = augment.padding_mode == "constant"
        self._along = move(torch.arange(-self._pad, self.size - self._pad))

    def drawn(self, indices: I64, draws: F64) -> dict[str, Tensor]:
        """What `crop` needs to know about some rows, still on the host."""
        rows = torch.from_numpy(indices)
        tensors = {"targets": self._targets[rows], "indices": rows}
        if self._pad:
            tensors[_CORNERS] = torch.from_numpy(crop_corners(draws, self._pad))
        return tensors

    def crop(self, batch: Batch) -> Batch:
        """The batch with its images instead of their corners; all on the device."""
        tensors = dict(batch.tensors)
        if not self._pad:
            images = self._images[tensors["indices"]]
        else:
            images = self._cropped(tensors["indices"], tensors.pop(_CORNERS))
        images = images.permute(0, 3, 1, 2)
        if images.shape[1] == 1:
            # With one channel both layouts hold the same bytes and torch keeps whichever strides it is given, but the
            # convolution of channels last has other bits.
            images = images.reshape(-1).view(images.shape)
        return Batch({**tensors, "images": images}, batch.positions, batch.groups)

    def _cropped(self, indices: Tensor, corners: Tensor) -> Tensor:
        """Crops [n, size, size, channels]; the border is not stored: its pixels are found by reflection or are 0."""
        places = corners[:, :, None] + self._along  # [n, 2, size]: row and column numbers in the bare image
        last = self.size - 1
        # Reflected at the first and at the last pixel; a black one may be taken from anywhere.
        inside = places.clamp(0, last) if self._is_black else last - (last - places.abs()).abs()
        rows, columns = inside[:, 0, :, None], inside[:, 1, None, :]
        images = self._images[indices[:, None, None], rows, columns]
        if not self._is_black:
            return images
        beyond = (places < 0) | (places > last)
        return images.masked_fill((beyond[:, 0, :, None] | beyond[:, 1, None, :])[..., None], 0)
