"""Random crops, flips and erased boxes.

The parameters of a crop are sampled apart from those of the other transforms, because the box also depends on the size
of its image: `host.py` has the views that crop.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.random import key, uniforms
from reconv.data.dataset import F64, I64, U8, NamedArrays
from reconv.data.decode.jpeg_header import PixelBox
from reconv.data.transforms.base import DeviceTransform, Rows
from reconv.recipe.parts.data import AugmentConfig, RandomErasingConfig

# Names of crop parameters. The size of an image is known only once its header is read, so a random resized crop has
# uniforms in [0, 1) that `random_resized_crop_box` maps to a box.
CROP_AREA = "crop_area"  # float64 [n, attempts]
CROP_RATIO = "crop_ratio"  # float64 [n, attempts]
CROP_POSITION = "crop_position"  # float64 [n, 2]: horizontal, vertical
CROP_CORNER = "crop_corner"  # int64 [n, 2]: top and left in the padded image

FLIPS = "flips"  # bool [n]
ERASE_BOXES = "erase_boxes"  # int64 [n, 4]: left, top, right, bottom; empty where nothing is erased

_ERASE_ATTEMPTS = 10


def crop_params(augment: AugmentConfig, seed: int, positions: I64) -> NamedArrays:
    """The parameters of each position's crop; empty without a crop."""
    base, attempts = key(seed, "crop"), augment.attempts
    if augment.crop == "random":
        return {CROP_CORNER: (uniforms(base, positions, 2) * (2 * augment.padding + 1)).astype(np.int64)}
    if augment.crop == "random_resized":
        values = uniforms(base, positions, 2 * attempts + 2)
        return {
            CROP_AREA: values[:, :attempts],
            CROP_RATIO: values[:, attempts : 2 * attempts],
            CROP_POSITION: values[:, 2 * attempts :],
        }
    return {}


class Flip(DeviceTransform):
    """Horizontal flips of images and their boxes. Every batch has their column, also without flips."""

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return True

    def sample(self, rows: Rows) -> NamedArrays:
        if self.augment.hflip_mode == "random" or self.augment.hflip == 0:
            return {FLIPS: random_flips(self.augment, rows.seed, rows.positions)}
        return {FLIPS: alternating_flips(self.augment, rows.seed, rows.indices, rows.epochs)}

    def apply(self, batch: Batch) -> Batch:
        if self.augment.hflip == 0:
            return batch
        images, flips = batch["images"], batch[FLIPS]
        flipped = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images)
        return self.apply_to_targets(batch).replace(images=flipped)

    def apply_to_targets(self, batch: Batch) -> Batch:
        if self.augment.hflip == 0 or "boxes" not in batch.tensors:
            return batch
        boxes, flips = batch["boxes"], batch[FLIPS]
        left, top, right, bottom = boxes.unbind(-1)
        flipped = torch.stack([1 - right, top, 1 - left, bottom], dim=-1)
        is_flipped = flips.view(-1, 1) & (batch["labels"] > 0)  # padding stays zero
        return batch.replace(boxes=torch.where(is_flipped[..., None], flipped, boxes))


def random_flips(augment: AugmentConfig, seed: int, positions: I64) -> npt.NDArray[np.bool_]:
    """True if each position's image is flipped horizontally."""
    return uniforms(key(seed, "flip"), positions, 1)[:, 0] < augment.hflip


def alternating_flips(augment: AugmentConfig, seed: int, indices: I64, epochs: I64) -> npt.NDArray[np.bool_]:
    """Mask of the flipped images: at random in even epochs, and the opposite in the following odd epoch."""
    in_even_epochs = uniforms(key(seed, "flip"), indices, 1)[:, 0] < augment.hflip
    flips: npt.NDArray[np.bool_] = in_even_epochs != (epochs % 2 == 1)
    return flips


class Erase(DeviceTransform):
    """Random erasing of normalized images: a box of the mean color."""

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return augment.random_erasing.probability > 0

    def sample(self, rows: Rows) -> NamedArrays:
        return {ERASE_BOXES: erase_boxes(self.augment.random_erasing, rows.seed, rows.positions, rows.size)}

    def apply(self, batch: Batch) -> Batch:
        images = batch["images"]
        return batch.replace(images=images.masked_fill(box_mask(batch[ERASE_BOXES], images.shape[-1]), 0))


def erase_boxes(config: RandomErasingConfig, seed: int, positions: I64, size: int) -> I64:
    """The box [n, 4] that random erasing clears: the first of ten smaller than the image; empty where none is."""
    values = uniforms(key(seed, "erase"), positions, 1 + 2 * _ERASE_ATTEMPTS + 2)
    coin, areas, ratios, position = np.split(values, [1, 1 + _ERASE_ATTEMPTS, 1 + 2 * _ERASE_ATTEMPTS], axis=1)
    boxes = np.zeros((len(positions), 4), np.int64)
    low, high = math.log(config.ratio[0]), math.log(config.ratio[1])
    for row in np.flatnonzero(coin[:, 0] < config.probability):
        areas_px = size * size * (config.scale[0] + areas[row] * (config.scale[1] - config.scale[0]))
        aspect = np.exp(low + ratios[row] * (high - low))
        widths = np.rint(np.sqrt(areas_px * aspect)).astype(np.int64)
        heights = np.rint(np.sqrt(areas_px / aspect)).astype(np.int64)
        fits = np.flatnonzero((widths < size) & (heights < size))
        if len(fits):
            boxes[row] = _box_at(position[row], size, size, int(widths[fits[0]]), int(heights[fits[0]]))
    return boxes


def box_mask(boxes: Tensor, size: int) -> Tensor:
    """Mask of the pixels inside each row's box: bool [n, 1, size, size] from int64 [n, 4]."""
    left, top, right, bottom = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    along = torch.arange(size, device=boxes.device)
    columns, rows = along.view(1, 1, 1, -1), along.view(1, 1, -1, 1)
    return (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)


def random_resized_crop_box(width: int, height: int, params: NamedArrays, augment: AugmentConfig) -> PixelBox:
    """The first random box that fits in the image: relative area uniform, aspect ratio log-uniform.

    If none fits: the largest centered box with a ratio in range, or the whole image. `params` is one row.
    """
    pixels = width * height
    smallest, span = augment.scale[0], augment.scale[1] - augment.scale[0]
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    # Scalars one after the other: the first box mostly fits, and sixteen operations on arrays of ten took 15 us.
    for area, ratio in zip(params[CROP_AREA].tolist(), params[CROP_RATIO].tolist(), strict=True):
        share, aspect = smallest + area * span, math.exp(low + ratio * (high - low))
        box_width, box_height = round(math.sqrt(pixels * share * aspect)), round(math.sqrt(pixels * share / aspect))
        if 0 < box_width <= width and 0 < box_height <= height:
            return _box_at(params[CROP_POSITION], width, height, box_width, box_height)
    if augment.fallback == "whole":
        return 0, 0, width, height
    box_width, box_height = _largest_inside(width, height, augment.ratio)
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def pad_crop(images: U8, corners: I64, pad: int, mode: str = "constant") -> U8:
    """Crops [n, channels, size, size] of the padded images at `corners` [n, 2] (top, left)."""
    height, width = images.shape[2:]
    border = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    padded = np.pad(images, border) if mode == "constant" else np.pad(images, border, mode="reflect")
    crops = np.empty_like(images)
    # Half again as fast as one fancy index into a view of all windows (512 images of 32 px).
    for row, (top, left) in enumerate(corners.tolist()):
        crops[row] = padded[row, :, top : top + height, left : left + width]
    return crops


def _box_at(position: F64, width: int, height: int, box_width: int, box_height: int) -> PixelBox:
    left = int(position[0] * (width - box_width + 1))
    top = int(position[1] * (height - box_height + 1))
    return left, top, left + box_width, top + box_height


def _largest_inside(width: int, height: int, ratio: tuple[float, float]) -> tuple[int, int]:
    if width / height < ratio[0]:
        return width, max(1, min(height, round(width / ratio[0])))
    if width / height > ratio[1]:
        return max(1, min(width, round(height * ratio[1]))), height
    return width, height
