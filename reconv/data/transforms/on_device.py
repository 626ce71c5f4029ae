"""What happens to a batch on the device: flip, normalise, erase, mix, cast.

Owns the arithmetic between uint8 images and the network's input. Refuses to know losses and devices: tensor
operations only, no read by the host. Invariant: each row's result depends on its own row and its mixing partner's
alone, bit for bit, whatever else is in the micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.data.transforms.mixup import DRAWN, apply_mix, inside
from reconv.data.transforms.random_params import ERASED, JITTERED, effective
from reconv.data.transforms.tf_color_jitter import jittered
from reconv.kernels.normalize_images.ops import normalize_images, supports
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig


class EvalPreprocess:
    """Normalised images, as evaluation and prediction see them."""

    def __init__(self, preprocess: PreprocessConfig, dtype: torch.dtype, channels_last: bool = False) -> None:
        self._normalise = Normalise(preprocess, dtype)
        self._dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format

    def __call__(self, batch: Batch, step: int | Tensor = 0) -> Batch:
        """The batch with its images normalised."""
        images = self._normalise(batch["images"])
        return batch.replace(images=images.to(self._dtype).contiguous(memory_format=self._layout))


class TrainPreprocess:
    """Flipped, recoloured, normalised, erased and mixed images; boxes follow a flip.

    Mixing adds `soft_targets`, `targets` stay the labels.
    """

    def __init__(
        self,
        preprocess: PreprocessConfig,
        augment: AugmentConfig,
        num_classes: int,
        dtype: torch.dtype,
        channels_last: bool = False,
        kernels: bool = False,  # whether one may do all of it in a pass, where it can
    ) -> None:
        self._normalise = Normalise(preprocess, dtype)
        self._augment = effective(augment)
        self._num_classes = num_classes
        self._dtype = dtype
        self._layout = torch.channels_last if channels_last else torch.contiguous_format
        is_more = (
            self._augment.random_erasing.probability > 0 or self._augment.mixes or preprocess.per_image_standardization
        )
        self._one_pass = kernels and channels_last and not is_more

    def __call__(self, batch: Batch, step: int | Tensor) -> Batch:
        """The batch as the network sees it; what is random was drawn by the loader."""
        if self._one_pass and JITTERED not in batch.tensors and supports(batch["images"], self._dtype):
            return self._prepared_at_once(batch)
        batch = mirrored(batch) if self._augment.hflip > 0 else batch
        images = batch["images"]
        if JITTERED in batch.tensors:
            images = jittered(images, batch[JITTERED], self._normalise.dtype)
        images = self._normalise(images)
        if self._augment.random_erasing.probability > 0:
            images = images.masked_fill(inside(batch[ERASED], images.shape[-1]), 0)
        if self._augment.mixes:
            drawn = {name: batch[name] for name in DRAWN}
            images, soft = apply_mix(images, batch["targets"], drawn, self._num_classes, self._augment)
            batch = batch.replace(soft_targets=soft)
        return batch.replace(images=images.to(self._dtype).contiguous(memory_format=self._layout))

    def rehearse(self, image: Sequence[int], dtype: torch.dtype) -> None:
        """Launch what a step on images [channels, height, width] would, without numbers, for those who note it."""
        if self._one_pass:
            images = torch.empty(1, *image, dtype=dtype, device="meta")
            flips = torch.empty(1, dtype=torch.bool, device="meta")
            self._prepared_at_once(Batch({"images": images, "flips": flips}, flips, (1,)))

    def _prepared_at_once(self, batch: Batch) -> Batch:
        images, flips = batch["images"], batch["flips"] if self._augment.hflip > 0 else None
        images = normalize_images(images, flips, *self._normalise.line(images.device), self._dtype)
        return (batch if flips is None else _boxes_mirrored(batch)).replace(images=images)


def mirrored(batch: Batch) -> Batch:
    """The batch with the images mirrored that `flips` names and, where there are some, their boxes."""
    images, flips = batch["images"], batch["flips"]
    return _boxes_mirrored(batch).replace(images=torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images))


def _boxes_mirrored(batch: Batch) -> Batch:
    if "boxes" not in batch.tensors:
        return batch
    boxes, flips = batch["boxes"], batch["flips"]
    left, top, right, bottom = boxes.unbind(-1)
    turned = torch.stack([1 - right, top, 1 - left, bottom], dim=-1)
    is_turned = flips.view(-1, 1) & (batch["labels"] > 0)  # padding stays zero
    return batch.replace(boxes=torch.where(is_turned[..., None], turned, boxes))


class Normalise:
    """uint8 images to floats: (x / scale - mean) / std per channel, or each image to mean 0 and deviation 1."""

    def __init__(self, preprocess: PreprocessConfig, dtype: torch.dtype) -> None:
        self._preprocess = preprocess
        self.dtype = torch.float64 if dtype == torch.float64 else torch.float32
        std = torch.tensor(preprocess.std, dtype=torch.float64)
        mean = torch.tensor(preprocess.mean, dtype=torch.float64)
        factor, shift = 1 / (preprocess.divide_by * std), -mean / std
        self._line = factor.to(self.dtype).view(1, -1, 1, 1), shift.to(self.dtype).view(1, -1, 1, 1)
        self._moved = self._line

    def __call__(self, images: Tensor) -> Tensor:
        """Floats (fp32, or fp64 when the network computes in fp64), not yet cast."""
        if self._preprocess.per_image_standardization:
            return _standardised(images, self.dtype)
        factor, shift = self.line(images.device)
        return images.to(self.dtype) * factor + shift

    def line(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """What each channel is multiplied by, and what is added then."""
        if self._moved[0].device != device:
            factor, shift = self._line
            self._moved = factor.to(device), shift.to(device)
        return self._moved


def _standardised(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Each image minus its mean, over its deviation (at least 1/sqrt(pixels), in units of 0 to 255)."""
    num_values = images[0].numel()
    # Integer sums are exact: a float sum would depend on how the reduction is split.
    total = images.sum((1, 2, 3), dtype=torch.int64)
    squares = images.to(torch.int32).square().sum((1, 2, 3), dtype=torch.int64)
    spread = (num_values * squares - total * total).to(dtype).sqrt() / num_values
    deviation = spread.clamp(min=num_values**-0.5).view(-1, 1, 1, 1)
    mean = (total.to(dtype) / num_values).view(-1, 1, 1, 1)
    return (images.to(dtype) - mean) / deviation


def unprepare(images: Tensor, preprocess: PreprocessConfig) -> Tensor:
    """Prepared images back as uint8 for an image; standardised ones are stretched to the full range."""
    floats = images.detach().to("cpu").to(torch.float64)
    if preprocess.per_image_standardization:
        low, high = floats.amin((1, 2, 3), keepdim=True), floats.amax((1, 2, 3), keepdim=True)
        floats = (floats - low) / (high - low).clamp(min=1e-12) * 255
    else:
        mean = torch.tensor(preprocess.mean, dtype=torch.float64).view(1, -1, 1, 1)
        std = torch.tensor(preprocess.std, dtype=torch.float64).view(1, -1, 1, 1)
        floats = (floats * std + mean) * preprocess.divide_by
    return floats.round().clamp(0, 255).to(torch.uint8).contiguous()
