"""Boxes of decoded images of different sizes, resized bilinearly into one batch of uint8 planes.

Owns the choice between the kernel and the plain form, and the plain form. Refuses to know files, draws and mirrors.
Limits of the kernel: planes [3, height, width] of uint8, each in one piece, and fewer than 2^31 bytes an image and a
batch. Invariant: a filter of triangles, as wide as the image is made smaller where it is antialiased; weights sum to
one and halves are rounded up. A box that is cut out has whole sides, and nothing outside it is looked at. Kernel and
plain form differ by one level at most, where float32 puts a value on the other side of a half.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reconv.kernels.dispatch import supports_device
from reconv.kernels.jit.launch import launch

CropBox = tuple[float, float, float, float]  # left, top, right, bottom

_TALL, _WIDE = 8, 32


def crop(
    pictures: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool = True, is_cut: bool = True
) -> Tensor:
    """The box of each image [3, height, width], resized to [n, 3, size, size]."""
    if not supports_device(pictures[0]):
        return crop_reference(pictures, boxes, size, antialias=antialias, is_cut=is_cut)
    from reconv.kernels.crop import triton as device

    for picture in pictures:
        if picture.dtype != torch.uint8 or picture.shape[0] != 3 or not picture.is_contiguous():
            raise ValueError(f"three planes of uint8 in one piece, not {picture.dtype} {tuple(picture.shape)}")
    entries, inside = [], []
    for picture, box in zip(pictures, boxes, strict=True):
        seen = _visible_box(picture, box, is_cut)
        entries.append((picture.data_ptr(), *picture.shape[1:], *seen))
        inside.append([side - seen[number % 2] for number, side in enumerate(box)])
    where = pictures[0].device
    table = _to_device(where, torch.tensor(entries, dtype=torch.int64))
    out = torch.empty((len(pictures), 3, size, size), dtype=torch.uint8, device=where)
    across, down = -(-size // _WIDE), -(-size // _TALL)
    grid, known = (across * down, len(pictures)), {"ANTIALIAS": int(antialias), "TALL": _TALL, "WIDE": _WIDE}
    launch(device.crop, grid, table, _to_device(where, torch.tensor(inside)), out, size, across, **known)
    return out


def crop_reference(
    pictures: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool = True, is_cut: bool = True
) -> Tensor:
    """The same as two products of matrices in float64, one image after the other."""
    rows = []
    for picture, box in zip(pictures, boxes, strict=True):
        left, top, right, bottom = _visible_box(picture, box, is_cut)
        part = picture[:, top:bottom, left:right].double()
        across = _weights(box[0] - left, box[2] - left, right - left, size, antialias).to(part.device)
        down = _weights(box[1] - top, box[3] - top, bottom - top, size, antialias).to(part.device)
        rows.append((down @ part @ across.T + 0.5).floor().clamp(0, 255).to(torch.uint8))
    return torch.stack(rows)


def _visible_box(picture: Tensor, box: CropBox, is_cut: bool) -> tuple[int, int, int, int]:
    """The part of an image that may be looked at."""
    left, top, right, bottom = (int(side) for side in box) if is_cut else (0, 0, picture.shape[2], picture.shape[1])
    return left, top, right, bottom


def _weights(low: float, high: float, length: int, size: int, antialias: bool) -> Tensor:
    """What each of so many pixels weighs in each of `size` [size, length]."""
    scale = (high - low) / size
    stretch = max(scale, 1.0) if antialias else 1.0
    centre = low + (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    far = (torch.arange(length, dtype=torch.float64) + 0.5 - centre[:, None]).abs() / stretch
    weights = (1 - far).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def _to_device(device: torch.device, table: Tensor) -> Tensor:
    """The table on the device; from ordinary memory its copy would wait for the stream."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
