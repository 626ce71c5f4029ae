"""AutoAugment and RandAugment policies, and the choice of a recipe's policy.

autoaugment: the ImageNet policy of Cubuk et al. 2019 (arXiv 1805.09501), strengths in ten levels. autoaugment-v0: the
ImageNet policy that EfficientNet's authors published with their code, strengths in eleven levels, enhancements and
solarizing with one sign. randaugment: Cubuk et al. 2020 (arXiv 1909.13719), 14 operations with equal probability,
strengths in 31 levels. The others are in `random_policies`.

Geometric operations of these three take the nearest pixel. They are applied before the flip on the device, which does
not matter: each has both signs with equal probability.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
from PIL import Image

from reconv.core.random import key, uniforms
from reconv.data.dataset import I64, NamedArrays
from reconv.data.decode.pillow import RESAMPLING
from reconv.data.transforms.base import HostTransform
from reconv.data.transforms.image_ops import Operation, apply_operation
from reconv.data.transforms.random_policies import (
    OP_APPLIED,
    OP_INDEX,
    OP_LEVEL,
    OP_NEGATED,
    three_augment_params,
    three_operation,
    timm_operation,
    timm_rand_params,
    trivial_operation,
    trivial_params,
)
from reconv.recipe.parts.data import AugmentConfig

# Names of the parameters.
SUB_POLICY = "sub_policy"  # int64 [n]: AutoAugment's pair of operations
OP_UNIFORM = "op_uniform"  # float64 [n, 2]: AutoAugment's operation is applied where this is below its probability

_MAX_SHIFT = 150 / 331  # of the side: 150 pixels of the 331 that the paper's networks saw
_WITH_LEVELS: Mapping[str, Callable[[int, float], Operation]] = {  # by name of the policy
    "randaugment": timm_operation,
    "ta_wide": trivial_operation,
    "3-augment": three_operation,
}


class Policy(HostTransform):
    """The operations of the recipe's policy.

    `interpolation` is that of geometric operations in timm's RandAugment and TrivialAugmentWide.
    """

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return augment.auto_augment != "none"

    def sample(self, seed: int, positions: I64) -> NamedArrays:
        base, augment = key(seed, "policy"), self.augment
        match augment.auto_augment:
            case "ta_wide":
                return trivial_params(base, positions)
            case "3-augment":
                return three_augment_params(base, positions)
            case "randaugment" if augment.randaugment.implementation == "timm":
                return timm_rand_params(augment.randaugment, base, positions)
            case "randaugment":
                values = uniforms(base, positions, 2 * augment.randaugment.num_ops)
                indices = (values[:, 0::2] * len(_RAND_NAMES)).astype(np.int64)
                return {OP_INDEX: indices, OP_NEGATED: values[:, 1::2] < 0.5}
        values = uniforms(base, positions, 5)
        sub_policy = (values[:, 0] * len(POLICIES[augment.auto_augment])).astype(np.int64)
        return {SUB_POLICY: sub_policy, OP_UNIFORM: values[:, 1::2], OP_NEGATED: values[:, 2::2] < 0.5}

    def apply(self, image: Image.Image, params: NamedArrays) -> Image.Image:
        augment = self.augment
        negated = params[OP_NEGATED].tolist()
        if OP_LEVEL in params:
            make = _WITH_LEVELS[augment.auto_augment]
            applied = params[OP_APPLIED].tolist() if OP_APPLIED in params else [True] * len(negated)
            choices = zip(params[OP_INDEX].tolist(), params[OP_LEVEL].tolist(), negated, applied, strict=True)
            for index, level, is_negated, is_applied in choices:
                if is_applied:
                    operation = make(index, level)
                    image = apply_operation(image, operation, is_negated, augment.fill, RESAMPLING[self.interpolation])
            return image
        if augment.auto_augment == "randaugment":
            operations = rand_operations(augment.randaugment.magnitude)
            for index, is_negated in zip(params[OP_INDEX].tolist(), negated, strict=True):
                image = apply_operation(image, operations[index], is_negated, augment.fill)
            return image
        pair = POLICIES[augment.auto_augment][int(params[SUB_POLICY])]
        for operation, value, is_negated in zip(pair, params[OP_UNIFORM].tolist(), negated, strict=True):
            if value < operation.probability:
                image = apply_operation(image, operation, is_negated, augment.fill)
        return image


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
