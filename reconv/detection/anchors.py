"""Default boxes: the fixed boxes a single-shot detector corrects, for every cell of every map.

Owns their shapes, places and order. Refuses to know networks: it is told the side of each map. Invariant: the order is
the published one, map by map from the largest, in each the shape first, then the row, then the column.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def shapes(scale: float, next_scale: float, ratios: Sequence[float]) -> list[tuple[float, float]]:
    """Width and height of a map's boxes: its square, one between it and the next map's, and each ratio both ways."""
    between = math.sqrt(scale * next_scale)
    sides = [(scale, scale), (between, between)]
    for ratio in ratios:
        long, short = scale * math.sqrt(ratio), scale / math.sqrt(ratio)
        sides += [(long, short), (short, long)]
    return sides


def default_boxes(
    pitches: Sequence[float], sides: Sequence[int], scales: Sequence[float], ratios: Sequence[Sequence[float]]
) -> Tensor:
    """Default boxes [num_boxes, 4] cxcywh in fractions of the input, float32.

    A map has `sides[k]` cells a side, whose centres are `pitches[k]` of the input apart; the first is half of that from
    the edge. Centres and sizes are clipped to [0, 1], corners are not.
    """
    levels = [
        _level(pitch, side, shapes(scale, next_scale, own))
        for pitch, side, scale, next_scale, own in zip(pitches, sides, scales[:-1], scales[1:], ratios, strict=True)
    ]
    return torch.cat(levels).clamp(0, 1).float()


def _level(pitch: float, side: int, sizes: Sequence[tuple[float, float]]) -> Tensor:
    """The boxes of one map, in fp64."""
    centres = (torch.arange(side, dtype=torch.float64) + 0.5) * pitch
    size = torch.tensor(sizes, dtype=torch.float64)
    shape = (len(sizes), side, side)
    columns = [
        centres.view(1, 1, side).expand(shape),
        centres.view(1, side, 1).expand(shape),
        size[:, 0].view(-1, 1, 1).expand(shape),
        size[:, 1].view(-1, 1, 1).expand(shape),
    ]
    return torch.stack(columns, dim=-1).view(-1, 4)
