"""Normalization of uint8 images on the device: all that evaluation and prediction do there."""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.kernels.ops.normalize_images import normalize_images, supports
from reconv.recipe.parts.data import PreprocessConfig


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
