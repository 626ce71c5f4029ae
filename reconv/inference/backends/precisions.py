"""The precision a network runs in: as trained, or as asked for; and how far each may be from eager.

A difference is the largest absolute one between two outputs on a few fixed images, relative to the largest output.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reconv.core.errors import UsageError
from reconv.core.random import key, uniforms
from reconv.device import Device
from reconv.device.cpu_features import has_bf16, has_int8
from reconv.inference.backends.base import Precision
from reconv.recipe.schema import Recipe

TOLERANCES = {"fp64": 1e-9, "fp32": 1e-3, "tf32": 1e-2, "fp16": 2e-2, "bf16": 1e-1}
DTYPES = {"fp64": torch.float64, "fp16": torch.float16, "bf16": torch.bfloat16}  # of weights; others: float32
_HALF = {"bf16": "bf16", "bf16-all": "bf16", "fp16": "fp16", "16.16": "fp16", "16.32": "fp16"}
NUM_IMAGES = 2
_PATCHES = 7  # along a side, of one color each


def trained_precision(recipe: Recipe) -> str:
    """The precision of a recipe's matrix products: fp64, fp32, tf32, bf16 or fp16."""
    mode = recipe.precision.mode
    return "fp32" if mode == "32.32" else _HALF.get(mode, mode)


def choose_precision(recipe: Recipe, device: Device, precision: Precision) -> str:
    """The precision asked for; `auto` is that of training, on a CPU fp32 where it has no instructions for it."""
    trained = trained_precision(recipe)
    if precision == "auto":
        is_slow = device.kind == "cpu" and (trained == "fp16" or (trained == "bf16" and not has_bf16()))
        return "fp32" if is_slow else trained
    if precision == "int8":
        _check_int8(device)
    if device.kind == "cpu" and (precision == "fp16" or (precision == "bf16" and not has_bf16())):
        raise UsageError(
            f"this CPU has no {precision} instructions",
            where="--precision",
            why="it would compute in fp32, slower",
            hint="omit --precision",
        )
    return precision


def _check_int8(device: Device) -> None:
    if device.kind != "cpu":
        raise UsageError(
            f"int8 is for CPUs, not for {device.kind}", where="--precision", hint="--device cpu, or omit --precision"
        )
    if not has_int8():
        raise UsageError(
            "this CPU has no int8 instructions",
            where="--precision",
            why="neither VNNI nor, on Arm, dot products",
            hint="omit --precision",
        )


def allowed_difference(precision: str, rounding: float = 0.0) -> float:
    """The largest accepted difference from eager; in half precision, twice eager's own `rounding` is accepted."""
    return max(TOLERANCES[precision], 2 * rounding)


def largest_difference(outputs: Any, expected: Any) -> float:
    """The largest absolute difference, relative to the largest expected value; infinite if shapes or NaNs differ."""
    pairs = list(zip(tree_leaves(outputs), tree_leaves(expected), strict=True))
    if any(o.shape != e.shape for o, e in pairs):  # they would be broadcast
        return math.inf
    largest = max(float(e.double().abs().max()) for _, e in pairs)
    difference = max(float((o.double() - e.double()).abs().max()) for o, e in pairs)
    return difference / max(largest, 1e-30) if math.isfinite(difference) else math.inf


def fixed_images(shape: Sequence[int]) -> Tensor:
    """Two uint8 images [2, channels, height, width] of colored patches with noise, always the same."""
    channels, height, width = shape
    stream = key(0, "backend-check")
    patches = uniforms(stream, np.arange(NUM_IMAGES), channels * _PATCHES**2)
    noise = uniforms(key(1, "backend-check"), np.arange(NUM_IMAGES), channels * height * width)
    colors = torch.from_numpy(patches).reshape(NUM_IMAGES, channels, _PATCHES, _PATCHES)
    smooth = F.interpolate(colors, (height, width), mode="bilinear", align_corners=False)
    mixed = 224 * smooth + 31 * torch.from_numpy(noise).reshape(NUM_IMAGES, channels, height, width)
    return mixed.round().to(torch.uint8)
