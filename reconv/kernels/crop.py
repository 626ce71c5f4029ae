"""Boxes of decoded pictures of different sizes, resized bilinearly into one batch of uint8 planes.

Owns the choice between the kernel and the plain form, and the plain form. Refuses to know files, draws and mirrors.
Limits of the kernel: planes [3, height, width] of uint8, each in one piece, and fewer than 2^31 bytes a picture and a
batch. Invariant: a filter of triangles, as wide as the picture is made smaller where it is antialiased; nothing outside
a box is looked at, weights sum to one and halves are rounded up. Kernel and plain form differ by one level at most,
where float32 puts a value on the other side of a half.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels.fused import reachable
from reconv.kernels.launch import launch

Box = tuple[int, int, int, int]  # left, top, right, bottom

_TALL, _WIDE = 8, 32


def crop(pictures: Sequence[Tensor], boxes: Sequence[Box], size: int, antialias: bool) -> Tensor:
    """The box of each picture [3, height, width], resized to [n, 3, size, size]."""
    if not reachable(pictures[0]):
        return crop_plainly(pictures, boxes, size, antialias)
    from reconv.kernels import crop_triton as device

    for picture in pictures:
        if picture.dtype != torch.uint8 or picture.shape[0] != 3 or not picture.is_contiguous():
            raise ValueError(f"three planes of uint8 in one piece, not {picture.dtype} {tuple(picture.shape)}")
    entries = [(picture.data_ptr(), *picture.shape[1:], *box) for picture, box in zip(pictures, boxes, strict=True)]
    where = pictures[0].device
    table = torch.tensor(entries, dtype=torch.int64)
    if where.type == "cuda":  # a copy from ordinary memory waits for the stream
        table = table.pin_memory().to(where, non_blocking=True)
    out = torch.empty((len(pictures), 3, size, size), dtype=torch.uint8, device=where)
    across, down = -(-size // _WIDE), -(-size // _TALL)
    grid, known = (across * down, len(pictures)), {"ANTIALIAS": int(antialias), "TALL": _TALL, "WIDE": _WIDE}
    launch(device.crop, grid, table, out, size, across, **known)
    return out


def crop_plainly(pictures: Sequence[Tensor], boxes: Sequence[Box], size: int, antialias: bool) -> Tensor:
    """The same by torch, one picture after the other."""
    rows = []
    for picture, (left, top, right, bottom) in zip(pictures, boxes, strict=True):
        part = picture[None, :, top:bottom, left:right].float()
        resized = F.interpolate(part, (size, size), mode="bilinear", antialias=antialias)
        rows.append((resized + 0.5).floor().clamp(0, 255).to(torch.uint8))
    return torch.cat(rows)
