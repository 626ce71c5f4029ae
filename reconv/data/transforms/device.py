"""Transforms on the device, between uint8 images and the network's input: flip, normalize, erase, mix and cast.

Tensor operations only, without a synchronization with the host. Each row's result depends on its own row and its
mixing partner's alone, bit for bit, whatever else is in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.transforms.color import is_jittered_on_device, jitter_on_device
from reconv.data.transforms.custom import device_transforms
from reconv.data.transforms.mixup import (
    CUTMIX_BOXES,
    CUTMIX_OFFSETS,
    MIXUP_OFFSETS,
    MIXUP_WEIGHTS,
    box_mask,
    mix_images,
    mix_params,
    mix_targets,
)
from reconv.data.transforms.params import COLOR_JITTER, ERASE_BOXES, FLIPS, effective_augment
from reconv.kernels.ops import color_jitter
from reconv.kernels.ops.normalize_images import normalize_and_mix, normalize_images, supports
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig


class EvalPreprocess:
    """Normalizes images for evaluation and prediction."""

    def __init__(
        self,
        preprocess: PreprocessConfig,
        dtype: torch.dtype,
        channels_last: bool = False,
        kernels: bool = False,  # whether one fused kernel may do all of it, where it can; it may round differently
    ) -> None:
        self._normalize = Normalize(preprocess, dtype)
        self._dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        self._fused = kernels and channels_last and not preprocess.per_image_standardization

    def __call__(self, batch: Batch, step: int | Tensor = 0) -> Batch:
        return batch.replace(images=self.prepare(batch["images"]))

    def prepare(self, images: Tensor) -> Tensor:
        """Images from 0 to 255 as the network takes them."""
        if self._fused and supports(images, self._dtype):
            return normalize_images(images, None, *self._normalize.affine(images.device), self._dtype)
        return self._normalize(images).to(self._dtype).contiguous(memory_format=self._layout)


class TrainPreprocess:
    """Flips, jitters, normalizes, erases and mixes training images; boxes are flipped with their images.

    Mixing adds `soft_targets`; `targets` stay the class indices.
    """

    def __init__(
        self,
        preprocess: PreprocessConfig,
        augment: AugmentConfig,
        num_classes: int,
        dtype: torch.dtype,
        channels_last: bool = False,
        kernels: bool = False,  # whether fused kernels may do all of it, where they can
    ) -> None:
        self._normalize = Normalize(preprocess, dtype)
        self._augment = effective_augment(augment)
        self._extra = device_transforms(self._augment)
        self._num_classes = num_classes
        self._dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        needs_more = (
            self._augment.random_erasing.probability > 0
            or (self._augment.mixes and is_jittered_on_device(self._augment))
            or preprocess.per_image_standardization
            or self._augment.device_extra
        )
        self._fused = kernels and channels_last and not needs_more

    def __call__(self, batch: Batch, step: int | Tensor) -> Batch:
        """The batch as the network takes it; the loader has sampled all random parameters."""
        if self._fused and self._supports(batch):
            return self._fused_transform(batch)
        batch = flip_batch(batch) if self._augment.hflip > 0 else batch
        images = batch["images"]
        if COLOR_JITTER in batch.tensors:
            images = jitter_on_device(images, batch[COLOR_JITTER], self._normalize.dtype)
        images = self._extra(self._normalize(images), batch.tensors)
        if self._augment.random_erasing.probability > 0:
            images = images.masked_fill(box_mask(batch[ERASE_BOXES], images.shape[-1]), 0)
        if self._augment.mixes:
            images = mix_images(images, batch.tensors, self._augment)
            batch = self._mix_targets(batch)
        return batch.replace(images=images.to(self._dtype).contiguous(memory_format=self._layout))

    def trace_kernels(self, image: Sequence[int], dtype: torch.dtype) -> None:
        """Launch the kernels of a step on meta tensors of images [channels, height, width], to be traced."""
        if self._fused:
            images = torch.empty(1, *image, dtype=dtype, device="meta")
            flips = torch.empty(1, dtype=torch.bool, device="meta")
            tensors = {"images": images, FLIPS: flips}
            if is_jittered_on_device(self._augment):
                tensors[COLOR_JITTER] = torch.empty(1, 4, device="meta")
            if self._augment.mixes:
                params = mix_params(self._augment, 0, 0, np.arange(1), (1,), image[-1])
                tensors |= {name: torch.from_numpy(values).to("meta") for name, values in params.items()}
            batch = Batch(tensors, flips, (1,))
            if self._supports(batch):
                self._fused_images(batch)

    def _supports(self, batch: Batch) -> bool:
        """True if the kernels support the images of this batch."""
        is_supported = color_jitter.supports if COLOR_JITTER in batch.tensors else supports
        return is_supported(batch["images"], self._dtype)

    def _fused_transform(self, batch: Batch) -> Batch:
        images = self._fused_images(batch)
        batch = _flip_boxes(batch) if self._augment.hflip > 0 else batch
        return (self._mix_targets(batch) if self._augment.mixes else batch).replace(images=images)

    def _fused_images(self, batch: Batch) -> Tensor:
        images, flips = batch["images"], batch[FLIPS] if self._augment.hflip > 0 else None
        factor, shift = self._normalize.affine(images.device)
        if COLOR_JITTER in batch.tensors:
            params = batch[COLOR_JITTER]
            return color_jitter.jitter_and_normalize(images, params, flips, factor, shift, self._dtype)
        if self._augment.mixes:
            mixup = (batch[MIXUP_OFFSETS], batch[MIXUP_WEIGHTS]) if self._augment.mixup.enabled else None
            cutmix = (batch[CUTMIX_OFFSETS], batch[CUTMIX_BOXES]) if self._augment.cutmix.enabled else None
            return normalize_and_mix(images, flips, factor, shift, mixup, cutmix, self._dtype)
        return normalize_images(images, flips, factor, shift, self._dtype)

    def _mix_targets(self, batch: Batch) -> Batch:
        size, dtype = batch["images"].shape[-1], self._normalize.dtype
        soft = mix_targets(batch["targets"], batch.tensors, self._num_classes, self._augment, size, dtype)
        return batch.replace(soft_targets=soft)


def flip_batch(batch: Batch) -> Batch:
    """The batch with images (and boxes, for detection) flipped where `flips` is set."""
    images, flips = batch["images"], batch[FLIPS]
    return _flip_boxes(batch).replace(images=torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images))


def _flip_boxes(batch: Batch) -> Batch:
    if "boxes" not in batch.tensors:
        return batch
    boxes, flips = batch["boxes"], batch[FLIPS]
    left, top, right, bottom = boxes.unbind(-1)
    flipped = torch.stack([1 - right, top, 1 - left, bottom], dim=-1)
    is_flipped = flips.view(-1, 1) & (batch["labels"] > 0)  # padding stays zero
    return batch.replace(boxes=torch.where(is_flipped[..., None], flipped, boxes))


class Normalize:
    """uint8 images to floats: (x / scale - mean) / std per channel, or each image to mean 0 and std 1."""

    def __init__(self, preprocess: PreprocessConfig, dtype: torch.dtype) -> None:
        self._preprocess = preprocess
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        std = torch.tensor(preprocess.std, dtype=torch.float64)
        mean = torch.tensor(preprocess.mean, dtype=torch.float64)
        factor, shift = 1 / (preprocess.divide_by * std), -mean / std
        self._affine = factor.to(self.dtype).view(1, -1, 1, 1), shift.to(self.dtype).view(1, -1, 1, 1)
        self._on_device = self._affine

    def __call__(self, images: Tensor) -> Tensor:
        """float32 images (float64 if the network computes in that), not yet cast to its dtype."""
        if self._preprocess.per_image_standardization:
            return standardize(images, self.dtype)
        factor, shift = self.affine(images.device)
        return images.to(self.dtype) * factor + shift

    def affine(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The factor and the shift of each channel [1, channels, 1, 1] on a device."""
        if self._on_device[0].device != device:
            factor, shift = self._affine
            self._on_device = factor.to(device), shift.to(device)
        return self._on_device


def standardize(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Each image minus its mean, divided by its standard deviation (at least 1/sqrt(pixels), in units of 0 to 255)."""
    num_values = images[0].numel()
    # Integer sums are exact: a float sum would depend on how the reduction is split.
    total = images.sum((1, 2, 3), dtype=torch.int64)
    squares = images.to(torch.int32).square().sum((1, 2, 3), dtype=torch.int64)
    std = (num_values * squares - total * total).to(dtype).sqrt() / num_values
    std = std.clamp(min=num_values**-0.5).view(-1, 1, 1, 1)
    mean = (total.to(dtype) / num_values).view(-1, 1, 1, 1)
    return (images.to(dtype) - mean) / std


def denormalize(images: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """Normalized images back to uint8, to be shown; standardized ones are stretched to the full range."""
    floats = images.detach().to("cpu").to(torch.float64)
    if preprocess.per_image_standardization:
        low, high = floats.amin((1, 2, 3), keepdim=True), floats.amax((1, 2, 3), keepdim=True)
        floats = (floats - low) / (high - low).clamp(min=1e-12) * 255
    else:
        mean = torch.tensor(preprocess.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(preprocess.std, dtype=torch.float64).view(1, -1, 1, 1)
        floats = (floats * std + mean) * preprocess.divide_by
    return floats.round().clamp(0, 255).to(torch.uint8).contiguous()
