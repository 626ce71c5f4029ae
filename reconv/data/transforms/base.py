"""The interfaces of a transform of training images, on decoded images and on the device.

A transform samples named arrays with one row per image, as functions of (seed, position), before any image is read;
its operation takes them from the batch, so a resumed run repeats it. Nothing that is decoded, and no worker, changes
them (tests/data/transforms/test_params.py). It does not know its neighbors: `train.py` has the order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from PIL import Image

from reconv.core.batch import Batch
from reconv.data.dataset import I64, NamedArrays
from reconv.recipe.parts.data import AugmentConfig, Interpolation


class HostTransform:
    """A transform of decoded images of the network's size, by Pillow."""

    def __init__(self, augment: AugmentConfig, interpolation: Interpolation = "bilinear") -> None:
        self.augment = augment
        self.interpolation = interpolation

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        """True if the recipe asks for it."""
        raise NotImplementedError

    def sample(self, seed: int, positions: I64) -> NamedArrays:
        """The parameters of the image at each position."""
        raise NotImplementedError

    def apply(self, image: Image.Image, params: NamedArrays) -> Image.Image:
        """The transformed image, of the same size and mode; `params` is one row of `sample`."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of a step that parameters are sampled for."""

    seed: int
    positions: I64
    indices: I64  # of the samples
    epochs: I64
    size: int  # height and width of the images


class DeviceTransform:
    """A transform of batches on the device, by tensor operations that do not wait for it.

    Each row's result depends on its own row, and for a `GroupTransform` its group, alone.
    """

    def __init__(self, augment: AugmentConfig, num_classes: int = 0, dtype: torch.dtype = torch.float32) -> None:
        """`num_classes`: of soft targets. `dtype`: float32 or float64, that of normalized images before their cast."""
        self.augment = augment
        self.num_classes = num_classes
        self.dtype = dtype

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        """True if the recipe asks for it."""
        raise NotImplementedError

    def sample(self, rows: Rows) -> NamedArrays:
        """The parameters of each row."""
        raise NotImplementedError

    def apply(self, batch: Batch) -> Batch:
        """The batch with transformed images and targets; it has the arrays of `sample` as tensors."""
        raise NotImplementedError

    def apply_to_targets(self, batch: Batch) -> Batch:
        """The batch with transformed targets alone, for a kernel that transforms the images."""
        return batch


class GroupTransform(DeviceTransform):
    """A transform that mixes the rows of a group (`batch.group`); it samples for micro-batches of whole groups."""

    def sample(self, rows: Rows) -> NamedArrays:
        return {}

    def sample_groups(self, seed: int, step: int, positions: I64, groups: Sequence[int], size: int) -> NamedArrays:
        """The parameters of each row of a micro-batch."""
        raise NotImplementedError
