"""Pictures of batches for people: a grid of tiles as a PNG.

Owns layout and encoding. Refuses to know what the images mean. Invariant: tiles keep row order, left to right.
"""

from __future__ import annotations

import io
import math

import numpy as np
from PIL import Image
from torch import Tensor

_GAP_PX = 2
_PAPER = 255


def grid(images: Tensor, columns: int | None = None, min_tile_px: int = 64) -> bytes:
    """PNG of uint8 images [n, 1 or 3, height, width], small ones enlarged by whole pixels; 8 columns or fewer."""
    num_images, channels, height, width = images.shape
    if num_images == 0:
        raise ValueError("a grid needs at least one image")
    columns = columns or min(8, math.ceil(math.sqrt(num_images)))
    num_rows = -(-num_images // columns)
    scale = max(1, -(-min_tile_px // max(height, width)))
    pixels = images.detach().cpu().numpy().transpose(0, 2, 3, 1).repeat(scale, axis=1).repeat(scale, axis=2)
    tile_height, tile_width = height * scale, width * scale
    sheet = np.full(
        (num_rows * (tile_height + _GAP_PX) - _GAP_PX, columns * (tile_width + _GAP_PX) - _GAP_PX, channels),
        _PAPER,
        np.uint8,
    )
    for number, tile in enumerate(pixels):
        top, left = (number // columns) * (tile_height + _GAP_PX), (number % columns) * (tile_width + _GAP_PX)
        sheet[top : top + tile_height, left : left + tile_width] = tile
    file = io.BytesIO()
    Image.fromarray(sheet[:, :, 0] if channels == 1 else sheet).save(file, "PNG", optimize=True)
    return file.getvalue()
