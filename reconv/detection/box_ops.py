"""Boxes from one form into another, and how much two overlap.

Owns the forms and the overlap. Refuses to know what boxes are of. Invariant: every tensor ends in 4 coordinates, in
the form its name says; a box without area overlaps nothing, and nothing here divides by zero.
"""

from __future__ import annotations

import torch
from torch import Tensor


def to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Corners from centre and size."""
    centre, half = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:] / 2
    return torch.cat([centre - half, centre + half], dim=-1)


def to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Centre and size from corners."""
    low, high = boxes_xyxy[..., :2], boxes_xyxy[..., 2:]
    return torch.cat([(low + high) / 2, high - low], dim=-1)


def area(boxes_xyxy: Tensor) -> Tensor:
    """The area of each box; 0 where corners are swapped."""
    sides = (boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]).clamp(min=0)
    return sides[..., 0] * sides[..., 1]


def iou(a_xyxy: Tensor, b_xyxy: Tensor) -> Tensor:
    """Intersection over union of boxes whose leading dimensions broadcast."""
    width = torch.minimum(a_xyxy[..., 2], b_xyxy[..., 2]) - torch.maximum(a_xyxy[..., 0], b_xyxy[..., 0])
    height = torch.minimum(a_xyxy[..., 3], b_xyxy[..., 3]) - torch.maximum(a_xyxy[..., 1], b_xyxy[..., 1])
    common = width.clamp(min=0) * height.clamp(min=0)
    union = area(a_xyxy) + area(b_xyxy) - common
    return torch.where(common > 0, common / torch.where(common > 0, union, 1), 0)
