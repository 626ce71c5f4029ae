"""Your own transforms of training images (`augment.extra`), with random numbers that depend on the position alone.

On the host `transform(image, rng)` takes and returns a PIL image of the network's size; `rng` is a numpy generator that
is seeded for each image. On the device `transform(images, uniforms)` takes and returns normalized images
[n, channels, size, size]; `uniforms` [n, k] are in [0, 1), and k is the attribute `num_uniforms` of the transform (1).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.custom_code import build_object, code_errors
from reconv.core.errors import UsageError
from reconv.core.random import generator, hash_array, key, uniforms
from reconv.data.dataset import I64, NamedArrays
from reconv.data.transforms.base import DeviceTransform, HostTransform, Rows
from reconv.recipe.parts.code import TransformConfig
from reconv.recipe.parts.data import AugmentConfig, Interpolation

EXTRA_KEYS = "extra_keys"  # uint64 [n, transforms]: the key of each generator
_EXTRA_UNIFORMS = "extra_uniforms_"  # and the number of the transform: float32 [n, k]


class HostExtra(HostTransform):
    """The user's transforms where images are decoded, in order."""

    def __init__(self, augment: AugmentConfig, interpolation: Interpolation = "bilinear") -> None:
        super().__init__(augment, interpolation)
        self._transforms = _build(augment.host_extra)

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return bool(augment.host_extra)

    def sample(self, seed: int, positions: I64) -> NamedArrays:
        """The keys of the generators of the transforms, at each position."""
        numbers = range(len(self._transforms))
        columns = [hash_array(key(seed, f"extra on host {number}"), positions) for number in numbers]
        return {EXTRA_KEYS: np.stack(columns, axis=1)}

    def apply(self, image: Image.Image, params: NamedArrays) -> Image.Image:
        for (name, transform), seed in zip(self._transforms, params[EXTRA_KEYS], strict=True):
            with code_errors(name):
                changed = transform(image, generator(int(seed)))
            if not isinstance(changed, Image.Image) or (changed.size, changed.mode) != (image.size, image.mode):
                is_image = isinstance(changed, Image.Image)
                actual = f"an image of {changed.size}, {changed.mode}" if is_image else f"a {type(changed).__name__}"
                raise UsageError(
                    f"{name} returns {actual}",
                    where="augment.extra",
                    why=f"it must keep the size {image.size} and the mode {image.mode} of the PIL image",
                )
            image = changed
        return image


class DeviceExtra(DeviceTransform):
    """The user's transforms of normalized images, in order."""

    def __init__(self, augment: AugmentConfig, num_classes: int = 0, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(augment, num_classes, dtype)
        self._transforms = _build(augment.device_extra)

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return bool(augment.device_extra)

    def sample(self, rows: Rows) -> NamedArrays:
        """The uniform numbers of each transform at each position."""
        return {
            f"{_EXTRA_UNIFORMS}{number}": uniforms(
                key(rows.seed, f"extra on device {number}"), rows.positions, getattr(transform, "num_uniforms", 1)
            ).astype(np.float32)
            for number, (_, transform) in enumerate(self._transforms)
        }

    def apply(self, batch: Batch) -> Batch:
        images = batch["images"]
        for number, (name, transform) in enumerate(self._transforms):
            with code_errors(name):
                changed = transform(images, batch[f"{_EXTRA_UNIFORMS}{number}"])
            if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (images.shape, images.dtype):
                is_tensor = isinstance(changed, Tensor)
                actual = f"{changed.dtype} {list(changed.shape)}" if is_tensor else f"a {type(changed).__name__}"
                raise UsageError(
                    f"{name} returns {actual}",
                    where="augment.extra",
                    why=f"it must keep the shape {list(images.shape)} and {images.dtype}",
                )
            images = changed
        return batch.replace(images=images)


def _build(configs: Sequence[TransformConfig]) -> tuple[tuple[str, Callable[..., Any]], ...]:
    """The name and the object of each transform."""
    built = tuple((config.name, build_object(config.name, config.options, "a transform")) for config in configs)
    for name, transform in built:
        if not callable(transform):
            raise UsageError(f"{name} is not a transform", where="augment.extra", why=f"it is {transform!r}")
    return built
