"""The operations of augmentation policies: named functions of Pillow images."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from PIL import Image, ImageEnhance, ImageFilter, ImageOps

Fill = int | tuple[int, int, int]  # gray level or color of uncovered pixels
# Image, strength, fill, and the resampling of geometric operations, by default the nearest pixel.
ImageOp = Callable[..., Image.Image]

_NEAREST = Image.Resampling.NEAREST
_SOLARIZE_ADD_BELOW = 128


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation with its strength and probability; `signed`: the strength is negated half of the time."""

    name: str
    strength: float = 0.0
    signed: bool = False
    probability: float = 1.0


def apply_operation(
    image: Image.Image, operation: Operation, negated: bool, fill: Fill, resample: Image.Resampling = _NEAREST
) -> Image.Image:
    """The image after an operation."""
    strength = -operation.strength if operation.signed and negated else operation.strength
    return OPERATIONS[operation.name](image, strength, fill, resample)


def _affine(image: Image.Image, matrix: tuple[float, ...], fill: Fill, resample: Image.Resampling) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, resample, fillcolor=_fill(image, fill))


def _fill(image: Image.Image, fill: Fill) -> int | tuple[int, ...]:
    if image.mode == "L":
        return fill if isinstance(fill, int) else round(sum(fill) / 3)
    return (fill,) * len(image.getbands()) if isinstance(fill, int) else fill


def _solarize_add(image: Image.Image, strength: float, *_: object) -> Image.Image:
    """Add to the pixels below a threshold only."""
    levels = [min(255, v + int(strength)) if v < _SOLARIZE_ADD_BELOW else v for v in range(256)]
    return image.point(levels * len(image.getbands()))


OPERATIONS: Mapping[str, ImageOp] = {
    "identity": lambda image, *_: image,
    "shear-x": lambda image, by, fill, resample=_NEAREST: _affine(image, (1, by, 0, 0, 1, 0), fill, resample),
    "shear-y": lambda image, by, fill, resample=_NEAREST: _affine(image, (1, 0, 0, by, 1, 0), fill, resample),
    # To whole pixels; `-rel` is not rounded.
    "translate-x": lambda image, by, fill, resample=_NEAREST: _affine(
        image, (1, 0, int(by * image.width), 0, 1, 0), fill, resample
    ),
    "translate-y": lambda image, by, fill, resample=_NEAREST: _affine(
        image, (1, 0, 0, 0, 1, int(by * image.height)), fill, resample
    ),
    "translate-x-rel": lambda image, by, fill, resample=_NEAREST: _affine(
        image, (1, 0, by * image.width, 0, 1, 0), fill, resample
    ),
    "translate-y-rel": lambda image, by, fill, resample=_NEAREST: _affine(
        image, (1, 0, 0, 0, 1, by * image.height), fill, resample
    ),
    "translate-x-pixels": lambda image, by, fill, resample=_NEAREST: _affine(
        image, (1, 0, by, 0, 1, 0), fill, resample
    ),
    "translate-y-pixels": lambda image, by, fill, resample=_NEAREST: _affine(
        image, (1, 0, 0, 0, 1, by), fill, resample
    ),
    "rotate": lambda image, by, fill, resample=_NEAREST: image.rotate(by, resample, fillcolor=_fill(image, fill)),
    "brightness": lambda image, by, *_: ImageEnhance.Brightness(image).enhance(1 + by),
    "color": lambda image, by, *_: ImageEnhance.Color(image).enhance(1 + by),
    "contrast": lambda image, by, *_: ImageEnhance.Contrast(image).enhance(1 + by),
    "sharpness": lambda image, by, *_: ImageEnhance.Sharpness(image).enhance(1 + by),
    "posterize": lambda image, bits, *_: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold, *_: ImageOps.solarize(image, math.ceil(threshold)),
    "solarize-add": _solarize_add,
    "autocontrast": lambda image, *_: ImageOps.autocontrast(image),
    "equalize": lambda image, *_: ImageOps.equalize(image),
    "invert": lambda image, *_: ImageOps.invert(image),
    "grayscale": lambda image, *_: image.convert("L").convert(image.mode),
    "blur": lambda image, radius, *_: image.filter(ImageFilter.GaussianBlur(radius)),
}
