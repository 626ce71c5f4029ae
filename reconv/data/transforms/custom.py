"""Your own transforms of training images (`augment.extra`), with random numbers that depend on the position alone.

On the host `transform(image, rng)` takes and returns a PIL image of the network's size; `rng` is a numpy generator that
is seeded for each image. On the device `transform(images, uniforms)` takes and returns normalized images
[n, channels, size, size]; `uniforms` [n, k] are in [0, 1), and k is the attribute `num_uniforms` of the transform (1).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from torch import Tensor

from reconv.core.custom_code import build_object, code_errors
from reconv.core.errors import UsageError
from reconv.core.random import generator, hash_array, key, uniforms
from reconv.data.dataset import I64, U8, NamedArrays
from reconv.data.decode.pillow import to_array, to_image
from reconv.recipe.parts.code import TransformConfig
from reconv.recipe.parts.data import AugmentConfig

EXTRA_KEYS = "extra_keys"  # uint64 [n, transforms]: the key of each generator
_EXTRA_UNIFORMS = "extra_uniforms_"  # and the number of the transform: float32 [n, k]

HostTransform = Callable[[Image.Image, np.random.Generator], Image.Image]
DeviceTransform = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class HostTransforms:
    """The user's transforms where images are decoded, in order."""

    names: tuple[str, ...]
    transforms: tuple[HostTransform, ...]

    def __call__(self, pixels: U8, params: NamedArrays) -> U8:
        """Transformed pixels [channels, size, size]; `params` is one row of `extra_host_params`."""
        image = to_image(np.ascontiguousarray(pixels.transpose(1, 2, 0)), len(pixels))
        for name, transform, seed in zip(self.names, self.transforms, params[EXTRA_KEYS], strict=True):
            with code_errors(name):
                changed = transform(image, generator(int(seed)))
            if not isinstance(changed, Image.Image) or (changed.size, changed.mode) != (image.size, image.mode):
                is_image = isinstance(changed, Image.Image)
                found = f"an image of {changed.size}, {changed.mode}" if is_image else f"a {type(changed).__name__}"
                raise UsageError(
                    f"{name} returns {found}",
                    where="augment.extra",
                    why=f"it must keep the size {image.size} and the mode {image.mode} of the PIL image",
                )
            image = changed
        return to_array(image).transpose(2, 0, 1)


@dataclass(frozen=True, slots=True)
class DeviceTransforms:
    """The user's transforms on the device, in order."""

    names: tuple[str, ...]
    transforms: tuple[DeviceTransform, ...]

    def params(self, seed: int, positions: I64) -> dict[str, npt.NDArray[np.generic]]:
        """The uniform numbers of each transform at each position."""
        return {
            f"{_EXTRA_UNIFORMS}{number}": uniforms(
                key(seed, f"extra on device {number}"), positions, getattr(transform, "num_uniforms", 1)
            ).astype(np.float32)
            for number, transform in enumerate(self.transforms)
        }

    def __call__(self, images: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
        """Transformed images; `tensors` has the numbers of `params`."""
        for number, (name, transform) in enumerate(zip(self.names, self.transforms, strict=True)):
            with code_errors(name):
                changed = transform(images, tensors[f"{_EXTRA_UNIFORMS}{number}"])
            if not isinstance(changed, Tensor) or (changed.shape, changed.dtype) != (images.shape, images.dtype):
                is_tensor = isinstance(changed, Tensor)
                found = f"{changed.dtype} {list(changed.shape)}" if is_tensor else f"a {type(changed).__name__}"
                raise UsageError(
                    f"{name} returns {found}",
                    where="augment.extra",
                    why=f"it must keep the shape {list(images.shape)} and {images.dtype}",
                )
            images = changed
        return images


def host_transforms(augment: AugmentConfig) -> HostTransforms | None:
    """The user's transforms on the host; None without any."""
    chosen = augment.host_extra
    return HostTransforms(*_build(chosen)) if chosen else None


def device_transforms(augment: AugmentConfig) -> DeviceTransforms:
    """The user's transforms on the device."""
    return DeviceTransforms(*_build(augment.device_extra))


def _build(configs: Sequence[TransformConfig]) -> tuple[tuple[str, ...], tuple[Callable[..., Any], ...]]:
    built = tuple(build_object(config.name, config.options, "a transform") for config in configs)
    for config, transform in zip(configs, built, strict=True):
        if not callable(transform):
            raise UsageError(f"{config.name} is not a transform", where="augment.extra", why=f"it is {transform!r}")
    return tuple(config.name for config in configs), built


def extra_host_params(augment: AugmentConfig, seed: int, positions: I64) -> NamedArrays:
    """The keys of the generators of the user's transforms on the host, at each position."""
    count = len(augment.host_extra)
    if count == 0:
        return {}
    columns = [hash_array(key(seed, f"extra on host {number}"), positions) for number in range(count)]
    return {EXTRA_KEYS: np.stack(columns, axis=1)}
