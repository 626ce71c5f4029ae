"""JPEG files of every form that Pillow writes, and of some that it only reads."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image


def photograph(width: int, height: int, seed: int = 0) -> npt.NDArray[np.uint8]:
    """Pixels [height, width, 3] with slopes, edges and a little noise, away from black and white."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[0:height, 0:width] / max(width, height)
    planes = []
    for _ in range(3):
        plane = sum(
            np.sin(rng.uniform(2, 25) * (a * x + b * y) + rng.uniform(0, 6)) for a, b in rng.normal(size=(4, 2))
        )
        plane = plane + 1.5 * ((x - rng.uniform()) ** 2 + (y - rng.uniform()) ** 2 < 0.1)
        planes.append(128 + 22 * plane + rng.normal(0, 3, plane.shape))
    pixels: npt.NDArray[np.uint8] = np.clip(np.stack(planes, 2), 40, 215).astype(np.uint8)
    return pixels


def encoded(pixels: npt.NDArray[np.uint8], mode: str = "RGB", **options: Any) -> bytes:
    """The pixels as a JPEG file."""
    file = io.BytesIO()
    Image.fromarray(pixels).convert(mode).save(file, "JPEG", **{"quality": 90, **options})
    return file.getvalue()


def segment_at(data: bytes, marker: int) -> int:
    """Where the content of the first segment of this kind begins, after its length."""
    at = 2
    while data[at + 1] != marker:
        at += 2 + int.from_bytes(data[at + 2 : at + 4], "big")
    return at + 4


def replaced(data: bytes, at: int, new: bytes) -> bytes:
    """The file with some bytes written over."""
    return data[:at] + new + data[at + len(new) :]


def inserted(data: bytes, marker: int, content: bytes) -> bytes:
    """The file with one more segment at its start."""
    return data[:2] + bytes([0xFF, marker]) + (len(content) + 2).to_bytes(2, "big") + content + data[2:]


def halved_down(width: int, height: int) -> bytes:
    """A file whose colors have half the height alone: 4:2:2 with its factors exchanged, its blocks thus moved."""
    data = encoded(np.full((height, width, 3), (90, 140, 180), np.uint8) + photograph(width, height) // 8,
                   subsampling="4:2:2")  # fmt: skip
    at = segment_at(data, 0xC0) + 7
    assert data[at] == 0x21
    return replaced(data, at, b"\x12")
