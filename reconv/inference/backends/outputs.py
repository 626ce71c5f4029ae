"""Comparing the outputs of two ways to run a network, on a few fixed images."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from reconv.core.random import key, uniforms

NUM_IMAGES = 2
_PATCHES = 7  # along a side, of one color each


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
