"""Small pieces the data tests share."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image

from reconv.data.sources.cifar import LAYOUTS, Layout


def encode(array: np.ndarray, format: str = "PNG", **options: object) -> bytes:
    """An array as an image file."""
    file = io.BytesIO()
    Image.fromarray(array).save(file, format, **options)
    return file.getvalue()


def noise(height: int, width: int, channels: int, seed: int) -> np.ndarray:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def cifar_layout(kind: str, form: str) -> Layout:
    """The layout of one form of one data set."""
    (layout,) = [layout for layout in LAYOUTS if (layout.kind, layout.form) == (kind, form)]
    return layout
