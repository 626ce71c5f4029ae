"""SSD anchors (the paper's default boxes)."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def anchor_sizes(scale: float, next_scale: float, aspect_ratios: Sequence[float]) -> list[tuple[float, float]]:
    """(width, height) of the anchors of one feature map.

    The square of this scale, the square between this scale and the next map's, then each aspect ratio and its inverse.
    """
    between = math.sqrt(scale * next_scale)
    sizes = [(scale, scale), (between, between)]
    for ratio in aspect_ratios:
        long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
        sizes += [(long, short), (short, long)]
    return sizes


def generate_anchors(
    strides: Sequence[float], grid_sizes: Sequence[int], scales: Sequence[float], ratios: Sequence[Sequence[float]]
) -> Tensor:
    """Anchors [num_anchors, 4] as cxcywh in fractions of the input, float32.

    Feature map k has `grid_sizes[k]` x `grid_sizes[k]` cells, whose centers are `strides[k]` (a fraction of the input)
    apart. The order is NVIDIA's: feature map, then anchor size, then row, then column. Centers and sizes are clipped to
    [0, 1], corners are not.
    """
    levels = [
        _level_anchors(stride, grid_size, anchor_sizes(scale, next_scale, level_ratios))
        for stride, grid_size, scale, next_scale, level_ratios in zip(
            strides, grid_sizes, scales[:-1], scales[1:], ratios, strict=True
        )
    ]
    return torch.cat(levels).clamp(0, 1).float()


def _level_anchors(stride: float, grid_size: int, sizes: Sequence[tuple[float, float]]) -> Tensor:
    """The anchors of one feature map, in float64."""
    centers = (torch.arange(grid_size, dtype=torch.float64) + 0.5) * stride
    size = torch.tensor(sizes, dtype=torch.float64)
    shape = (len(sizes), grid_size, grid_size)
    columns = [
        centers.view(1, 1, grid_size).expand(shape),
        centers.view(1, grid_size, 1).expand(shape),
        size[:, 0].view(-1, 1, 1).expand(shape),
        size[:, 1].view(-1, 1, 1).expand(shape),
    ]
    return torch.stack(columns, dim=-1).view(-1, 4)
