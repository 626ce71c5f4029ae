"""The transforms of training images, in order: where images are decoded, and between uint8 images and the network.

Tensor operations on the device do not wait for it. Each row's result depends on its own row and its mixing partner's
alone, bit for bit, whatever else is in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.dataset import I64, U8, NamedArrays
from reconv.data.decode.pillow import to_array, to_image
from reconv.data.transforms.auto_augment import Policy
from reconv.data.transforms.base import DeviceTransform, GroupTransform, HostTransform, Rows
from reconv.data.transforms.color import COLOR_JITTER, ColorJitter, DeviceColorJitter
from reconv.data.transforms.custom import DeviceExtra, HostExtra
from reconv.data.transforms.geometry import CROP_CORNER, FLIPS, Erase, Flip, crop_params, pad_crop
from reconv.data.transforms.mixup import CUTMIX_BOXES, CUTMIX_OFFSETS, MIXUP_OFFSETS, MIXUP_WEIGHTS, Mix
from reconv.data.transforms.normalize import Normalize
from reconv.kernels.ops import color_jitter, normalize_images
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig, effective_augment

ON_HOST: tuple[type[HostTransform], ...] = (ColorJitter, Policy, HostExtra)
OF_PIXELS: tuple[type[DeviceTransform], ...] = (Flip, DeviceColorJitter)  # before normalization
OF_NORMALIZED: tuple[type[DeviceTransform], ...] = (DeviceExtra, Erase, Mix)


def changes_images_on_host(augment: AugmentConfig) -> bool:
    """True if anything after the crop runs on decoded images."""
    return any(transform.is_active(augment) for transform in ON_HOST)


class HostTransforms:
    """The random crop of `crop: random`, and the transforms of decoded images."""

    def __init__(self, preprocess: PreprocessConfig, augment: AugmentConfig) -> None:
        self._channels = preprocess.channels
        self._augment = augment
        # 3-Augment comes before color jitter, as in DeiT III.
        first = (Policy,) if augment.auto_augment == "3-augment" else ()
        in_order = (*first, *(transform for transform in ON_HOST if transform not in first))
        active = (transform for transform in in_order if transform.is_active(augment))
        self._transforms = tuple(transform(augment, preprocess.interpolation) for transform in active)
        self.is_identity = augment.crop != "random" and not self._transforms

    def sample(self, seed: int, positions: I64) -> NamedArrays:
        """The parameters of the crop (also of one that a view makes) and of the transforms at each position."""
        params = dict(crop_params(self._augment, seed, positions))
        for transform in self._transforms:
            params |= transform.sample(seed, positions)
        return params

    def apply(self, pixels: U8, params: NamedArrays) -> None:
        """Change an image [channels, size, size] in place; `params` is one row of `sample`."""
        augment = self._augment
        if augment.crop == "random":
            pixels[:] = pad_crop(pixels[None], params[CROP_CORNER][None], augment.padding, augment.padding_mode)[0]
        if self._transforms:
            image = to_image(np.ascontiguousarray(pixels.transpose(1, 2, 0)), self._channels)
            for transform in self._transforms:
                image = transform.apply(image, params)
            pixels[:] = to_array(image).transpose(2, 0, 1)


class DeviceParams:
    """The parameters of the transforms on the device, sampled on the host."""

    def __init__(self, augment: AugmentConfig) -> None:
        transforms = [transform(augment) for transform in (*OF_PIXELS, *OF_NORMALIZED) if transform.is_active(augment)]
        self._of_groups = tuple(transform for transform in transforms if isinstance(transform, GroupTransform))
        self._of_rows = tuple(transform for transform in transforms if not isinstance(transform, GroupTransform))

    def sample(self, rows: Rows) -> dict[str, Tensor]:
        """The parameters of each row of a step."""
        arrays = [transform.sample(rows) for transform in self._of_rows]
        return {name: torch.from_numpy(array) for named in arrays for name, array in named.items()}

    def sample_groups(
        self, seed: int, step: int, positions: I64, groups: Sequence[int], size: int
    ) -> dict[str, Tensor]:
        """The parameters of the groups of a micro-batch, for each of its rows."""
        arrays = [transform.sample_groups(seed, step, positions, groups, size) for transform in self._of_groups]
        return {name: torch.from_numpy(array) for named in arrays for name, array in named.items()}


class TrainPreprocess:
    """Transforms and normalizes training images; boxes are flipped with their images, targets mixed with them."""

    def __init__(
        self,
        preprocess: PreprocessConfig,
        augment: AugmentConfig,
        num_classes: int,
        dtype: torch.dtype,
        channels_last: bool = False,
        kernels: bool = False,  # whether a fused kernel may do all of it, where it can
    ) -> None:
        self._normalize = Normalize(preprocess, dtype)
        self._augment = augment = effective_augment(augment)
        self._dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

        def build(transforms: Sequence[type[DeviceTransform]]) -> tuple[DeviceTransform, ...]:
            active = [transform for transform in transforms if transform.is_active(augment)]
            return tuple(transform(augment, num_classes, self._normalize.dtype) for transform in active)

        self._of_pixels, self._of_normalized = build(OF_PIXELS), build(OF_NORMALIZED)
        may_fuse = kernels and channels_last and not preprocess.per_image_standardization
        active = {type(transform) for transform in (*self._of_pixels, *self._of_normalized)}
        self._kernel = next((kernel for kernel in _KERNELS if may_fuse and active <= kernel.transforms), None)

    def __call__(self, batch: Batch, step: int | Tensor) -> Batch:
        """The batch as the network takes it; the loader has sampled all random parameters."""
        if self._kernel is not None and self._kernel.supports(batch["images"], self._dtype):
            images = self._fused_images(self._kernel, batch)
            for transform in (*self._of_pixels, *self._of_normalized):
                batch = transform.apply_to_targets(batch)
            return batch.replace(images=images)
        for transform in self._of_pixels:
            batch = transform.apply(batch)
        batch = batch.replace(images=self._normalize(batch["images"]))
        for transform in self._of_normalized:
            batch = transform.apply(batch)
        return batch.replace(images=batch["images"].to(self._dtype).contiguous(memory_format=self._layout))

    def trace_kernels(self, image: Sequence[int], dtype: torch.dtype) -> None:
        """Launch the kernels of a step on meta tensors of images [channels, height, width], to be traced."""
        if self._kernel is not None:
            params, one = DeviceParams(self._augment), np.zeros(1, np.int64)
            tensors = params.sample(Rows(0, one, one, one, image[-1]))
            tensors |= params.sample_groups(0, 0, one, (1,), image[-1])
            images = torch.empty(1, *image, dtype=dtype, device="meta")
            batch = Batch({"images": images, **{k: t.to("meta") for k, t in tensors.items()}}, images, (1,))
            if self._kernel.supports(images, self._dtype):
                self._fused_images(self._kernel, batch)

    def _fused_images(self, kernel: _Kernel, batch: Batch) -> Tensor:
        affine = self._normalize.affine(batch["images"].device)
        return kernel.compute(batch, self._augment, affine, self._dtype)


@dataclass(frozen=True, slots=True)
class _Kernel:
    """A kernel that does what a set of transforms does to images, or any part of it, and normalizes them."""

    transforms: frozenset[type[DeviceTransform]]
    supports: Callable[[Tensor, torch.dtype], bool]
    compute: Callable[[Batch, AugmentConfig, tuple[Tensor, Tensor], torch.dtype], Tensor]


def _flips(batch: Batch, augment: AugmentConfig) -> Tensor | None:
    return batch[FLIPS] if augment.hflip > 0 else None


def _normalized(batch: Batch, augment: AugmentConfig, affine: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    return normalize_images.normalize_images(batch["images"], _flips(batch, augment), *affine, dtype)


def _mixed(batch: Batch, augment: AugmentConfig, affine: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    mixup = (batch[MIXUP_OFFSETS], batch[MIXUP_WEIGHTS]) if augment.mixup.enabled else None
    cutmix = (batch[CUTMIX_OFFSETS], batch[CUTMIX_BOXES]) if augment.cutmix.enabled else None
    flips = _flips(batch, augment)
    return normalize_images.normalize_and_mix(batch["images"], flips, *affine, mixup, cutmix, dtype)


def _jittered(batch: Batch, augment: AugmentConfig, affine: tuple[Tensor, Tensor], dtype: torch.dtype) -> Tensor:
    flips = _flips(batch, augment)
    return color_jitter.jitter_and_normalize(batch["images"], batch[COLOR_JITTER], flips, *affine, dtype)


_KERNELS = (  # the first one that has all active transforms is taken
    _Kernel(frozenset({Flip}), normalize_images.supports, _normalized),
    _Kernel(frozenset({Flip, Mix}), normalize_images.supports, _mixed),
    _Kernel(frozenset({Flip, DeviceColorJitter}), color_jitter.supports, _jittered),
)
