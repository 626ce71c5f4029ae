"""AutoAugment and RandAugment: named operations on uint8 images, and the policies that choose among them.

autoaugment: the ImageNet policy of Cubuk et al. 2019 (arXiv 1805.09501), strengths in ten levels. autoaugment-v0: the
ImageNet policy that EfficientNet's authors published with their code, strengths in eleven levels, enhancements and
solarizing with one sign. randaugment: Cubuk et al. 2020 (arXiv 1909.13719), 14 operations with equal probability,
strengths in 31 levels.

Geometric operations take the nearest pixel and fill with gray. They are applied before the flip on the device, which
does not matter: each has both signs with equal probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageEnhance, ImageOps

from reconv.data.dataset import I64, NamedArrays
from reconv.random import key, uniforms
from reconv.recipe.data_fields import AugmentConfig

ImageOp = Callable[[Image.Image, float, int], Image.Image]  # image, strength, gray level of the fill

# Names of the parameters.
SUB_POLICY = "sub_policy"  # int64 [n]: AutoAugment's pair of operations
OP_UNIFORM = "op_uniform"  # float64 [n, 2]: AutoAugment's operation is applied where this is below its probability
OP_INDEX = "op_index"  # int64 [n, num_ops]: RandAugment's operations
OP_NEGATED = "op_negated"  # bool [n, num_ops]: whether the strength of a signed operation is negated

_SOLARIZE_ADD_BELOW = 128
_MAX_SHIFT = 150 / 331  # of the side: 150 pixels of the 331 that the paper's networks saw


@dataclass(frozen=True, slots=True)
class Operation:
    """An operation with its strength and probability; `signed`: the strength is negated half of the time."""

    name: str
    strength: float = 0.0
    signed: bool = False
    probability: float = 1.0


def auto_augment_params(augment: AugmentConfig, seed: int, positions: I64) -> NamedArrays:
    """Which operations each position's image gets; empty without a policy."""
    if augment.auto_augment == "none":
        return {}
    base = key(seed, "policy")
    if augment.auto_augment == "randaugment":
        values = uniforms(base, positions, 2 * augment.randaugment.num_ops)
        indices = (values[:, 0::2] * len(_RAND_NAMES)).astype(np.int64)
        return {OP_INDEX: indices, OP_NEGATED: values[:, 1::2] < 0.5}
    values = uniforms(base, positions, 5)
    sub_policy = (values[:, 0] * len(POLICIES[augment.auto_augment])).astype(np.int64)
    return {SUB_POLICY: sub_policy, OP_UNIFORM: values[:, 1::2], OP_NEGATED: values[:, 2::2] < 0.5}


def auto_augment(image: Image.Image, augment: AugmentConfig, params: NamedArrays) -> Image.Image:
    """The image after the operations of its policy; `params` is one row of `auto_augment_params`."""
    if augment.auto_augment == "none":
        return image
    negated = params[OP_NEGATED].tolist()
    if augment.auto_augment == "randaugment":
        choices = rand_operations(augment.randaugment.magnitude)
        for index, is_negated in zip(params[OP_INDEX].tolist(), negated, strict=True):
            image = apply_operation(image, choices[index], is_negated, augment.fill)
        return image
    pair = POLICIES[augment.auto_augment][int(params[SUB_POLICY])]
    for operation, value, is_negated in zip(pair, params[OP_UNIFORM].tolist(), negated, strict=True):
        if value < operation.probability:
            image = apply_operation(image, operation, is_negated, augment.fill)
    return image


def apply_operation(image: Image.Image, operation: Operation, negated: bool, gray: int) -> Image.Image:
    strength = -operation.strength if operation.signed and negated else operation.strength
    return OPERATIONS[operation.name](image, strength, gray)


def _affine(image: Image.Image, matrix: tuple[float, ...], gray: int) -> Image.Image:
    return image.transform(image.size, Image.Transform.AFFINE, matrix, fillcolor=_fill(image, gray))


def _fill(image: Image.Image, gray: int) -> int | tuple[int, ...]:
    return gray if image.mode == "L" else (gray,) * len(image.getbands())


def _solarize_add(image: Image.Image, strength: float, _: int) -> Image.Image:
    """Add to the pixels below a threshold only."""
    levels = [min(255, v + int(strength)) if v < _SOLARIZE_ADD_BELOW else v for v in range(256)]
    return image.point(levels * len(image.getbands()))


OPERATIONS: Mapping[str, ImageOp] = {
    "identity": lambda image, _, __: image,
    "shear-x": lambda image, by, gray: _affine(image, (1, by, 0, 0, 1, 0), gray),
    "shear-y": lambda image, by, gray: _affine(image, (1, 0, 0, by, 1, 0), gray),
    "translate-x": lambda image, by, gray: _affine(image, (1, 0, int(by * image.width), 0, 1, 0), gray),
    "translate-y": lambda image, by, gray: _affine(image, (1, 0, 0, 0, 1, int(by * image.height)), gray),
    "translate-y-pixels": lambda image, by, gray: _affine(image, (1, 0, 0, 0, 1, by), gray),
    "rotate": lambda image, by, gray: image.rotate(by, fillcolor=_fill(image, gray)),
    "brightness": lambda image, by, _: ImageEnhance.Brightness(image).enhance(1 + by),
    "color": lambda image, by, _: ImageEnhance.Color(image).enhance(1 + by),
    "contrast": lambda image, by, _: ImageEnhance.Contrast(image).enhance(1 + by),
    "sharpness": lambda image, by, _: ImageEnhance.Sharpness(image).enhance(1 + by),
    "posterize": lambda image, bits, _: ImageOps.posterize(image, int(bits)),
    "solarize": lambda image, threshold, _: ImageOps.solarize(image, math.ceil(threshold)),
    "solarize-add": _solarize_add,
    "autocontrast": lambda image, _, __: ImageOps.autocontrast(image),
    "equalize": lambda image, _, __: ImageOps.equalize(image),
    "invert": lambda image, _, __: ImageOps.invert(image),
}

_ENHANCEMENTS = ("brightness", "color", "contrast", "sharpness")
_PLAIN = ("identity", "autocontrast", "equalize", "invert")


def _scaled(name: str, magnitude: float, probability: float = 1.0) -> Operation:
    """An operation at a magnitude of 0 (weakest) to 1 (strongest), as the papers scale them."""
    if name in _PLAIN:
        return Operation(name, probability=probability)
    if name == "posterize":
        return Operation(name, 8 - round(4 * magnitude), probability=probability)
    if name == "solarize":
        return Operation(name, 256 * (1 - magnitude), probability=probability)
    signed = {"shear-x": 0.3, "shear-y": 0.3, "translate-x": _MAX_SHIFT, "translate-y": _MAX_SHIFT, "rotate": 30.0}
    return Operation(name, magnitude * (0.9 if name in _ENHANCEMENTS else signed[name]), True, probability)


def _scaled_v0(name: str, magnitude: float, probability: float) -> Operation:
    """The same as EfficientNet's code scales it: posterize and solarize are strongest at 0."""
    if name in _PLAIN:
        return Operation(name, probability=probability)
    if name in _ENHANCEMENTS:
        return Operation(name, 1.8 * magnitude - 0.9, probability=probability)
    if name == "solarize":
        return Operation(name, 256 * magnitude, probability=probability)
    whole = {"posterize": 4, "solarize-add": 110}
    if name in whole:
        return Operation(name, round(magnitude * whole[name]), probability=probability)
    signed = {"shear-x": 0.3, "shear-y": 0.3, "translate-y-pixels": 250.0, "rotate": 30.0}
    return Operation(name, magnitude * signed[name], True, probability)


_RAND_NAMES = (
    *("identity", "shear-x", "shear-y", "translate-x", "translate-y", "rotate", "brightness"),
    *("color", "contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)


def rand_operations(magnitude: int) -> tuple[Operation, ...]:
    """RandAugment's operations at a magnitude of 0 to 30."""
    return tuple(_scaled(name, magnitude / 30) for name in _RAND_NAMES)


# Each row: two operations with their probability and level. Rows repeat where the papers' tables do.
_PAPER = (
    ("posterize", 0.4, 8, "rotate", 0.6, 9),
    ("solarize", 0.6, 5, "autocontrast", 0.6, 5),
    ("equalize", 0.8, 8, "equalize", 0.6, 3),
    ("posterize", 0.6, 7, "posterize", 0.6, 6),
    ("equalize", 0.4, 7, "solarize", 0.2, 4),
    ("equalize", 0.4, 4, "rotate", 0.8, 8),
    ("solarize", 0.6, 3, "equalize", 0.6, 7),
    ("posterize", 0.8, 5, "equalize", 1.0, 2),
    ("rotate", 0.2, 3, "solarize", 0.6, 8),
    ("equalize", 0.6, 8, "posterize", 0.4, 6),
    ("rotate", 0.8, 8, "color", 0.4, 0),
    ("rotate", 0.4, 9, "equalize", 0.6, 2),
    ("equalize", 0.0, 7, "equalize", 0.8, 8),
    ("invert", 0.6, 4, "equalize", 1.0, 8),
    ("color", 0.6, 4, "contrast", 1.0, 8),
    ("rotate", 0.8, 8, "color", 1.0, 2),
    ("color", 0.8, 8, "solarize", 0.8, 7),
    ("sharpness", 0.4, 7, "invert", 0.6, 8),
    ("shear-x", 0.6, 5, "equalize", 1.0, 9),
    ("color", 0.4, 0, "equalize", 0.6, 3),
    ("equalize", 0.4, 7, "solarize", 0.2, 4),
    ("solarize", 0.6, 5, "autocontrast", 0.6, 5),
    ("invert", 0.6, 4, "equalize", 1.0, 8),
    ("color", 0.6, 4, "contrast", 1.0, 8),
    ("equalize", 0.8, 8, "equalize", 0.6, 3),
)
_V0 = (
    ("equalize", 0.8, 1, "shear-y", 0.8, 4),
    ("color", 0.4, 9, "equalize", 0.6, 3),
    ("color", 0.4, 1, "rotate", 0.6, 8),
    ("solarize", 0.8, 3, "equalize", 0.4, 7),
    ("solarize", 0.4, 2, "solarize", 0.6, 2),
    ("color", 0.2, 0, "equalize", 0.8, 8),
    ("equalize", 0.4, 8, "solarize-add", 0.8, 3),
    ("shear-x", 0.2, 9, "rotate", 0.6, 8),
    ("color", 0.6, 1, "equalize", 1.0, 2),
    ("invert", 0.4, 9, "rotate", 0.6, 0),
    ("equalize", 1.0, 9, "shear-y", 0.6, 3),
    ("color", 0.4, 7, "equalize", 0.6, 0),
    ("posterize", 0.4, 6, "autocontrast", 0.4, 7),
    ("solarize", 0.6, 8, "color", 0.6, 9),
    ("solarize", 0.2, 4, "rotate", 0.8, 9),
    ("rotate", 1.0, 7, "translate-y-pixels", 0.8, 9),
    ("shear-x", 0.0, 0, "solarize", 0.8, 4),
    ("shear-y", 0.8, 0, "color", 0.6, 4),
    ("color", 1.0, 0, "rotate", 0.6, 2),
    ("equalize", 0.8, 4, "equalize", 0.0, 8),
    ("equalize", 1.0, 4, "autocontrast", 0.6, 2),
    ("shear-y", 0.4, 7, "solarize-add", 0.6, 7),
    ("posterize", 0.8, 2, "solarize", 0.6, 10),
    ("solarize", 0.6, 8, "equalize", 0.6, 1),
    ("color", 0.8, 6, "rotate", 0.4, 5),
)
POLICIES: Mapping[str, tuple[tuple[Operation, Operation], ...]] = {
    "autoaugment": tuple((_scaled(a, m / 9, p), _scaled(b, n / 9, q)) for a, p, m, b, q, n in _PAPER),
    "autoaugment-v0": tuple((_scaled_v0(a, m / 10, p), _scaled_v0(b, n / 10, q)) for a, p, m, b, q, n in _V0),
}
