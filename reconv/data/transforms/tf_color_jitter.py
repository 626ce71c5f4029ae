"""Colour jitter on the device, as TensorFlow's image operations do it, unrounded and unclipped.

Owns that arithmetic. Refuses to know what was drawn and what becomes of the result. Invariant: each row's result
depends on its own pixels and draws alone, bit for bit; draws that change nothing leave pixels within rounding.
"""

from __future__ import annotations

import torch
from torch import Tensor

_WHITE = 255


def jittered(images: Tensor, drawn: Tensor, dtype: torch.dtype) -> Tensor:
    """Images uint8 [n, channels, h, w] after brightness, contrast, saturation and hue, as floats of 0 to 255.

    `drawn` [n, 4] is what is added (1 is white), the factors of contrast and saturation, and the turn of the hue.
    """
    added, contrast, saturation, turn = (column.view(-1, 1, 1, 1) for column in drawn.to(dtype).unbind(1))
    # Integer sums are exact: a float sum would depend on how the reduction is split.
    num_pixels = images.shape[-2] * images.shape[-1]
    means = images.sum((2, 3), keepdim=True, dtype=torch.int64).to(dtype) / (num_pixels * _WHITE)
    pixels = (images.to(dtype) / _WHITE - means) * contrast + means + added
    if images.shape[1] == 3:
        pixels = _recoloured(pixels, saturation, turn)
    return pixels * _WHITE


def _recoloured(pixels: Tensor, factor: Tensor, turn: Tensor) -> Tensor:
    """The saturation (of HSV) multiplied, cut to 0 to 1, and the hue turned by a share of the circle."""
    value, low = pixels.amax(1, keepdim=True), pixels.amin(1, keepdim=True)
    spread = value - low
    safe = torch.where(spread > 0, spread, 1)
    red, green, blue = pixels.split(1, dim=1)
    of_sixth = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    hue = torch.where(spread > 0, of_sixth, 0) + 6 * turn
    saturation = torch.where(value > 0, spread / torch.where(value > 0, value, 1), 0) * factor
    saturation = saturation.clamp(0, 1)
    hue = torch.remainder(hue, 6)
    shares = torch.cat([(hue - 3).abs() - 1, 2 - (hue - 2).abs(), 2 - (hue - 4).abs()], dim=1).clamp(0, 1)
    return ((shares - 1) * saturation + 1) * value
