"""Cropping boxes of decoded images of different sizes and resizing them bilinearly into one uint8 batch.

The filter is a triangle, widened for downscaling if antialiased; weights sum to one, and .5 rounds up. The kernel
supports contiguous uint8 planes [3, height, width] of fewer than 2^31 bytes. It differs from the reference by at most
one level, where float32 rounds to the other side of .5.
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
    images: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool = True, is_cut: bool = True
) -> Tensor:
    """The box of each image [3, height, width], resized to [n, 3, size, size].

    With `is_cut` boxes have integer sides and pixels outside them are not read.
    """
    if not supports_device(images[0]):
        return crop_reference(images, boxes, size, antialias=antialias, is_cut=is_cut)
    from reconv.kernels.triton import crop as kernels

    for image in images:
        if image.dtype != torch.uint8 or image.shape[0] != 3 or not image.is_contiguous():
            raise ValueError(f"expected three contiguous uint8 planes, not {image.dtype} {tuple(image.shape)}")
    entries, inside = [], []
    for image, box in zip(images, boxes, strict=True):
        visible = _visible_box(image, box, is_cut)
        entries.append((image.data_ptr(), *image.shape[1:], *visible))
        inside.append([side - visible[number % 2] for number, side in enumerate(box)])
    device = images[0].device
    table = _to_device(device, torch.tensor(entries, dtype=torch.int64))
    out = torch.empty((len(images), 3, size, size), dtype=torch.uint8, device=device)
    across, down = -(-size // _WIDE), -(-size // _TALL)
    grid, constants = (across * down, len(images)), {"ANTIALIAS": int(antialias), "TALL": _TALL, "WIDE": _WIDE}
    launch(kernels.crop, grid, table, _to_device(device, torch.tensor(inside)), out, size, across, **constants)
    return out


def crop_reference(
    images: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool = True, is_cut: bool = True
) -> Tensor:
    """The same by matrix products in float64, image by image."""
    rows = []
    for image, box in zip(images, boxes, strict=True):
        left, top, right, bottom = _visible_box(image, box, is_cut)
        part = image[:, top:bottom, left:right].double()
        across = _weights(box[0] - left, box[2] - left, right - left, size, antialias).to(part.device)
        down = _weights(box[1] - top, box[3] - top, bottom - top, size, antialias).to(part.device)
        rows.append((down @ part @ across.T + 0.5).floor().clamp(0, 255).to(torch.uint8))
    return torch.stack(rows)


def _visible_box(image: Tensor, box: CropBox, is_cut: bool) -> tuple[int, int, int, int]:
    """The part of an image whose pixels may be read."""
    left, top, right, bottom = (int(side) for side in box) if is_cut else (0, 0, image.shape[2], image.shape[1])
    return left, top, right, bottom


def _weights(low: float, high: float, length: int, size: int, antialias: bool) -> Tensor:
    """Resize weights [size, length] from `length` pixels to `size`."""
    scale = (high - low) / size
    stretch = max(scale, 1.0) if antialias else 1.0
    center = low + (torch.arange(size, dtype=torch.float64) + 0.5) * scale
    distance = (torch.arange(length, dtype=torch.float64) + 0.5 - center[:, None]).abs() / stretch
    weights = (1 - distance).clamp(min=0)
    return weights / weights.sum(1, keepdim=True)


def _to_device(device: torch.device, table: Tensor) -> Tensor:
    """The table on the device; a copy from pageable memory would synchronize the stream."""
    return table.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else table
