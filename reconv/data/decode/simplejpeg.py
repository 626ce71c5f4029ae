"""The decoder of plain JPEG files: simplejpeg if it is installed and gives Pillow's pixels, else Pillow.

`jpeg_header.read_header` decides which files are baseline JPEG.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from reconv.core.random import hash_array
from reconv.data.dataset import U8
from reconv.data.decode.jpeg_header import PixelBox

PILLOW, SIMPLEJPEG = "Pillow", "simplejpeg"
_SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")

# The pixels [height, width, 3] in a box of a plain JPEG file; ValueError or OSError if they do not decode.
DecodeJpeg = Callable[[bytes | bytearray, PixelBox], U8]


def decode_with_pillow(data: bytes | bytearray, box: PixelBox) -> U8:
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as opened:
        pixels: U8 = np.asarray(opened.crop(box).convert("RGB"))
    return pixels


@cache
def jpeg_decoder() -> tuple[str, DecodeJpeg]:
    """The name of this process's decoder, and the decoder."""
    try:
        simplejpeg: Any = importlib.import_module(SIMPLEJPEG)
    except ImportError:
        return PILLOW, decode_with_pillow

    def decode(data: bytes | bytearray, box: PixelBox) -> U8:
        left, top, right, bottom = box
        # Not strict: what libjpeg only warns of is not an error for Pillow either.
        pixels: U8 = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=False)
        return pixels[top:bottom, left:right]

    return (SIMPLEJPEG, decode) if matches_pillow(decode) else (PILLOW, decode_with_pillow)


def matches_pillow(decode: DecodeJpeg) -> bool:
    """True if a decoder gives Pillow's pixels for noise, in gray and in color with each chroma subsampling."""
    noise = (hash_array(0, np.arange(45 * 67 * 3)) >> np.uint64(56)).astype(np.uint8).reshape(45, 67, 3)
    whole = (0, 0, 67, 45)
    image = Image.fromarray(noise)
    files = [_encode(image, subsampling=sampling) for sampling in _SAMPLINGS]
    files.append(_encode(image.convert("L")))
    return all(np.array_equal(decode(data, whole), decode_with_pillow(data, whole)) for data in files)


def _encode(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80, **options)
    return file.getvalue()
