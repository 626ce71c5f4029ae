"""Policies whose strengths are drawn for each image: timm's RandAugment, TrivialAugmentWide and 3-Augment.

timm's RandAugment (`rand-m7-mstd0.5-inc1`): each operation is applied with probability 0.5, at a magnitude drawn from a
normal distribution. TrivialAugmentWide (Mueller and Hutter, 2021) as in torchvision: one operation at one of 31
strengths. 3-Augment (Touvron et al., 2022, DeiT III): grayscale, solarizing or blur.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from reconv.core.random import uniforms
from reconv.data.dataset import I64, NamedArrays
from reconv.data.transforms.image_ops import Operation
from reconv.recipe.parts.data import RandAugmentConfig

# Names of the parameters.
OP_INDEX = "op_index"  # int64 [n, num_ops]: which operations
OP_NEGATED = "op_negated"  # bool [n, num_ops]: whether the strength of a signed operation is negated
OP_APPLIED = "op_applied"  # bool [n, num_ops]
OP_LEVEL = "op_level"  # float64 [n, num_ops]: strength, from 0 to 1

_TIMM_LEVELS = 10
_TIMM_NAMES = (
    *("autocontrast", "equalize", "invert", "rotate", "posterize", "solarize", "solarize-add", "color", "contrast"),
    *("brightness", "sharpness", "shear-x", "shear-y", "translate-x-rel", "translate-y-rel"),
)
_TRIVIAL_NAMES = (
    *("identity", "shear-x", "shear-y", "translate-x-pixels", "translate-y-pixels", "rotate", "brightness", "color"),
    *("contrast", "sharpness", "posterize", "solarize", "autocontrast", "equalize"),
)
_TRIVIAL_LEVELS = 31
_THREE_NAMES = ("grayscale", "solarize", "blur")
_MIN_RADIUS, _MAX_RADIUS = 0.1, 2.0  # of 3-Augment's blur


def timm_rand_params(config: RandAugmentConfig, base: int, positions: I64) -> NamedArrays:
    """The operations and levels of each image, by timm's RandAugment."""
    values = uniforms(base, positions, 5 * config.num_ops).reshape(len(positions), config.num_ops, 5)
    noise = _normal(values[..., 3], values[..., 4]) * config.magnitude_std
    return {
        OP_INDEX: (values[..., 0] * len(_TIMM_NAMES)).astype(np.int64),
        OP_APPLIED: values[..., 1] < 0.5,
        OP_NEGATED: values[..., 2] < 0.5,
        OP_LEVEL: np.clip(config.magnitude + noise, 0, _TIMM_LEVELS) / _TIMM_LEVELS,
    }


def trivial_params(base: int, positions: I64) -> NamedArrays:
    """The operation and its level of each image, by TrivialAugmentWide."""
    values = uniforms(base, positions, 3)[:, None]
    return {
        OP_INDEX: (values[..., 0] * len(_TRIVIAL_NAMES)).astype(np.int64),
        OP_NEGATED: values[..., 1] < 0.5,
        OP_LEVEL: np.floor(values[..., 2] * _TRIVIAL_LEVELS) / (_TRIVIAL_LEVELS - 1),
    }


def three_augment_params(base: int, positions: I64) -> NamedArrays:
    """Choice among the three operations for each image, and its radius as a fraction of the range."""
    values = uniforms(base, positions, 2)[:, None]
    indices = (values[..., 0] * len(_THREE_NAMES)).astype(np.int64)
    return {OP_INDEX: indices, OP_NEGATED: np.zeros_like(indices, np.bool_), OP_LEVEL: values[..., 1]}


def timm_operation(index: int, level: float) -> Operation:
    """An operation of timm's RandAugment with `inc1`, at a level of 0 to 1."""
    name = _TIMM_NAMES[index]
    match name:
        case "posterize":
            return Operation(name, max(1, 4 - int(4 * level)))  # without a bit left an image would be black
        case "solarize":
            return Operation(name, 256 - int(256 * level))
        case "solarize-add":
            return Operation(name, int(110 * level))
        case "translate-x-rel" | "translate-y-rel":
            return Operation(name, 0.45 * level, signed=True)
        case "shear-x" | "shear-y":
            return Operation(name, 0.3 * level, signed=True)
        case "rotate":
            return Operation(name, 30 * level, signed=True)
        case "color" | "contrast" | "brightness" | "sharpness":
            return Operation(name, 0.9 * level, signed=True)
        case _:
            return Operation(name)


def trivial_operation(index: int, level: float) -> Operation:
    """An operation of TrivialAugmentWide at a level of 0 to 1."""
    name = _TRIVIAL_NAMES[index]
    match name:
        case "posterize":
            return Operation(name, 8 - round(6 * level))
        case "solarize":
            return Operation(name, 255 * (1 - level))
        case "translate-x-pixels" | "translate-y-pixels":
            return Operation(name, int(32 * level), signed=True)
        case "rotate":
            return Operation(name, 135 * level, signed=True)
        case "identity" | "autocontrast" | "equalize":
            return Operation(name)
        case _:
            return Operation(name, 0.99 * level, signed=True)


def three_operation(index: int, level: float) -> Operation:
    """An operation of 3-Augment."""
    name = _THREE_NAMES[index]
    strengths = {"solarize": 128.0, "blur": _MIN_RADIUS + (_MAX_RADIUS - _MIN_RADIUS) * level}
    return Operation(name, strengths.get(name, 0.0))


def _normal(first: npt.NDArray[np.float64], second: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Standard normal numbers from two uniform ones each, by Box and Muller."""
    normal: npt.NDArray[np.float64] = np.sqrt(-2 * np.log1p(-first)) * np.cos(2 * np.pi * second)
    return normal
