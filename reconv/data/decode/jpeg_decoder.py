"""Who decodes plain JPEG files: simplejpeg where it is installed and agrees with Pillow, else Pillow.

Owns the choice. Refuses to know crops and files that are not plain (`jpeg.head` says which are). Invariant: the pixels
do not depend on the choice: a decoder that gives others than Pillow for a few small images is not taken.
"""

from __future__ import annotations

import importlib
import io
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
from PIL import Image

from reconv.data.dataset import U8
from reconv.data.transforms.random_params import Box
from reconv.random import hash_array

PILLOW, SIMPLEJPEG = "Pillow", "simplejpeg"
_SAMPLINGS = ("4:4:4", "4:2:2", "4:2:0")

# The pixels [height, width, 3] in a box of a plain JPEG file; ValueError or OSError where there are none.
DecodeJpeg = Callable[[bytes | bytearray, Box], U8]


def decode_with_pillow(data: bytes | bytearray, box: Box) -> U8:
    """The pixels in a box of a plain JPEG file."""
    with Image.open(io.BytesIO(data), formats=("JPEG",)) as opened:
        pixels: U8 = np.asarray(opened.crop(box).convert("RGB"))
    return pixels


@cache
def jpeg_decoder() -> tuple[str, DecodeJpeg]:
    """The decoder of this process and its name."""
    try:
        simplejpeg: Any = importlib.import_module(SIMPLEJPEG)
    except ImportError:
        return PILLOW, decode_with_pillow

    def decode(data: bytes | bytearray, box: Box) -> U8:
        left, top, right, bottom = box
        # Not strict: libjpeg's warnings about damaged bytes are no errors to Pillow either.
        pixels: U8 = simplejpeg.decode_jpeg(data, "RGB", fastdct=False, fastupsample=False, strict=False)
        return pixels[top:bottom, left:right]

    return (SIMPLEJPEG, decode) if agrees(decode) else (PILLOW, decode_with_pillow)


def agrees(decode: DecodeJpeg) -> bool:
    """Whether a decoder gives Pillow's pixels for noise, in colour of each sampling and in grey."""
    noise = (hash_array(0, np.arange(45 * 67 * 3)) >> np.uint64(56)).astype(np.uint8).reshape(45, 67, 3)
    whole = (0, 0, 67, 45)
    image = Image.fromarray(noise)
    files = [_encoded(image, subsampling=sampling) for sampling in _SAMPLINGS]
    files.append(_encoded(image.convert("L")))
    return all(np.array_equal(decode(data, whole), decode_with_pillow(data, whole)) for data in files)


def _encoded(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "JPEG", quality=80, **options)
    return file.getvalue()
