"""Random crops, flips, colours and erased boxes: what is drawn, and what crops and colours do to pixels.

Owns the draws and the geometry. Refuses to know where images come from and what runs on the device (flips, erasing).
Invariant: a draw is a function of (seed, stream, position); an image's crop of (draw, width, height).
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageEnhance

from reconv.data.dataset import I64, U8
from reconv.data.transforms.auto_augment import apply_policy, num_policy_draws
from reconv.random import key, uniforms
from reconv.recipe.data_fields import AugmentConfig, ColorJitterConfig, RandomErasingConfig, ZoomOutConfig

F64 = npt.NDArray[np.float64]
Box = tuple[int, int, int, int]  # left, top, right, bottom

JITTERED = "jitter"  # float32 [n, 4], as `draw_jitter` has it
ERASED = "erase_boxes"  # int64 [n, 4]: left, top, right, bottom of what is erased; empty where nothing is
_ERASE_TRIES = 10
_JITTER_DRAWS = 4


def effective(augment: AugmentConfig) -> AugmentConfig:
    """The augmentation that really happens: nothing but mixing where training images are made as evaluation's."""
    if not augment.train_like_eval:
        return augment
    return augment.model_copy(update={"crop": "none", "hflip": 0.0, "zoom_out": ZoomOutConfig()})


def draw_host(augment: AugmentConfig, seed: int, positions: I64) -> F64:
    """The uniforms of all that happens to an image on the host, side by side: crop, colours, policy."""
    return np.concatenate(
        [
            draw_crops(augment, seed, positions),
            uniforms(key(seed, "jitter"), positions, _JITTER_DRAWS if _is_jittered_here(augment) else 0),
            uniforms(key(seed, "policy"), positions, num_policy_draws(augment)),
        ],
        axis=1,
    )


def draw_crops(augment: AugmentConfig, seed: int, positions: I64) -> F64:
    """The uniforms each position's crop is made from: [n, as many as the kind of crop needs]."""
    return uniforms(key(seed, "crop"), positions, _num_crop_draws(augment))


def draw_flips(augment: AugmentConfig, seed: int, positions: I64) -> npt.NDArray[np.bool_]:
    """Whether each position's image is mirrored."""
    return uniforms(key(seed, "flip"), positions, 1)[:, 0] < augment.hflip


def alternate_flips(augment: AugmentConfig, seed: int, indices: I64, epochs: I64) -> npt.NDArray[np.bool_]:
    """Whether each image is mirrored: as its own draw says in even epochs, the other way in odd ones."""
    own = uniforms(key(seed, "flip"), indices, 1)[:, 0] < augment.hflip
    flips: npt.NDArray[np.bool_] = own != (epochs % 2 == 1)
    return flips


def draw_erased(erase: RandomErasingConfig, seed: int, positions: I64, size: int) -> I64:
    """The box each position's image loses [n, 4]; the first of ten that is smaller than the image, else none."""
    draws = uniforms(key(seed, "erase"), positions, 1 + 2 * _ERASE_TRIES + 2)
    boxes = np.zeros((len(positions), 4), np.int64)
    for row in np.flatnonzero(draws[:, 0] < erase.probability):
        tried = draws[row, 1:]
        widths, heights = _sides(size * size, tried, _ERASE_TRIES, erase.scale, erase.ratio)
        fits = np.flatnonzero((widths < size) & (heights < size))
        if len(fits):
            boxes[row] = _placed(size, size, int(widths[fits[0]]), int(heights[fits[0]]), tried[2 * _ERASE_TRIES :])
    return boxes


def crop_draws(augment: AugmentConfig, draws: F64) -> F64:
    """The columns of `draw_host` that belong to the crop."""
    return draws[..., : _num_crop_draws(augment)]


def recolour(image: Image.Image, augment: AugmentConfig, draws: F64) -> Image.Image:
    """The cropped image after colour jitter and policy; `draws` is one row of `draw_host`."""
    start = _num_crop_draws(augment)
    if _is_jittered_here(augment):
        image = jitter(image, augment.color_jitter, draws[start : start + _JITTER_DRAWS])
        start += _JITTER_DRAWS
    return apply_policy(image, augment, draws[start:])


def is_recolouring(augment: AugmentConfig) -> bool:
    """Whether `recolour` does anything."""
    return _is_jittered_here(augment) or augment.auto_augment != "none"


def _is_jittered_here(augment: AugmentConfig) -> bool:
    return augment.color_jitter.on and augment.color_jitter.implementation == "pillow"


def draw_jitter(augment: AugmentConfig, seed: int, positions: I64) -> npt.NDArray[np.float32]:
    """What the device changes colours by [n, 4]: added brightness, factors of contrast and saturation, turn of hue."""
    section = augment.color_jitter
    draws = 2 * uniforms(key(seed, "jitter"), positions, _JITTER_DRAWS) - 1
    most = np.array([section.brightness, section.contrast, section.saturation, section.hue])
    # A factor may not turn an image into its negative.
    lowest = np.array([-np.inf, 0, 0, -np.inf])
    changes: npt.NDArray[np.float64] = np.maximum(draws * most + np.array([0, 1, 1, 0]), lowest)
    return changes.astype(np.float32)


def jitter(image: Image.Image, section: ColorJitterConfig, draws: F64) -> Image.Image:
    """Brightness, contrast, saturation and hue, in this order, each as far as its draw says."""
    enhancers = (
        (ImageEnhance.Brightness, section.brightness),
        (ImageEnhance.Contrast, section.contrast),
        (ImageEnhance.Color, section.saturation),
    )
    for (enhancer, most), draw in zip(enhancers, draws[:3].tolist(), strict=True):
        if most > 0:
            low = max(0.0, 1 - most)
            image = enhancer(image).enhance(low + draw * (1 + most - low))
    if section.hue > 0:
        image = turn_hue(image, (2 * float(draws[3]) - 1) * section.hue)
    return image


def turn_hue(image: Image.Image, turn: float) -> Image.Image:
    """The hue turned by a share of the whole circle."""
    hue, saturation, value = image.convert("HSV").split()
    turned = Image.fromarray(np.asarray(hue) + np.uint8(round(turn * 255) % 256))
    return Image.merge("HSV", (turned, saturation, value)).convert("RGB")


def resized_box(width: int, height: int, draws: F64, augment: AugmentConfig) -> Box:
    """The first random box that fits: its share of the area uniform, its aspect ratio log-uniform.

    If none fits: the largest centred box whose ratio is in range, or the whole image.
    """
    tries, pixels = augment.attempts, width * height
    # One number after the other: most first boxes fit, and sixteen operations on arrays of ten took 15 us.
    drawn = draws.tolist()
    smallest, span = augment.scale[0], augment.scale[1] - augment.scale[0]
    low, high = math.log(augment.ratio[0]), math.log(augment.ratio[1])
    for share_drawn, ratio_drawn in zip(drawn[:tries], drawn[tries : 2 * tries], strict=True):
        share, ratio = smallest + share_drawn * span, math.exp(low + ratio_drawn * (high - low))
        box_width, box_height = round(math.sqrt(pixels * share * ratio)), round(math.sqrt(pixels * share / ratio))
        if 0 < box_width <= width and 0 < box_height <= height:
            return _placed(width, height, box_width, box_height, draws[2 * tries :])
    if augment.fallback == "whole":
        return 0, 0, width, height
    box_width, box_height = _inside(width, height, augment.ratio)
    left, top = (width - box_width) // 2, (height - box_height) // 2
    return left, top, left + box_width, top + box_height


def _num_crop_draws(augment: AugmentConfig) -> int:
    return {"none": 0, "random": 2, "random_resized": 2 * augment.attempts + 2}[augment.crop]


def _sides(
    pixels: int, draws: F64, tries: int, area: tuple[float, float], ratio: tuple[float, float]
) -> tuple[I64, I64]:
    """Widths and heights of random boxes: the area's share from the first `tries` draws, the ratio from the next."""
    shares = area[0] + draws[:tries] * (area[1] - area[0])
    low, high = math.log(ratio[0]), math.log(ratio[1])
    ratios = np.exp(low + draws[tries : 2 * tries] * (high - low))
    widths = np.rint(np.sqrt(pixels * shares * ratios)).astype(np.int64)
    heights = np.rint(np.sqrt(pixels * shares / ratios)).astype(np.int64)
    return widths, heights


def _placed(width: int, height: int, box_width: int, box_height: int, draws: F64) -> Box:
    left = int(draws[0] * (width - box_width + 1))
    top = int(draws[1] * (height - box_height + 1))
    return left, top, left + box_width, top + box_height


def _inside(width: int, height: int, ratio: tuple[float, float]) -> tuple[int, int]:
    if width / height < ratio[0]:
        return width, max(1, min(height, round(width / ratio[0])))
    if width / height > ratio[1]:
        return max(1, min(width, round(height * ratio[1]))), height
    return width, height


def crop_corners(draws: F64, pad: int) -> I64:
    """Top and left of each crop [n, 2] in the image with its border."""
    return (draws * (2 * pad + 1)).astype(np.int64)


def pad_crop(images: U8, draws: F64, pad: int, form: str = "constant") -> U8:
    """Crops of the images' own size [n, channels, size, size] out of the images with a border around them."""
    height, width = images.shape[2:]
    border = ((0, 0), (0, 0), (pad, pad), (pad, pad))
    padded = np.pad(images, border) if form == "constant" else np.pad(images, border, mode="reflect")
    corners = crop_corners(draws, pad)
    crops = np.empty_like(images)
    # Half again as fast as one fancy index into a view of all windows (512 images of 32 px).
    for row, (top, left) in enumerate(corners.tolist()):
        crops[row] = padded[row, :, top : top + height, left : left + width]
    return crops
