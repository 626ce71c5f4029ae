"""Conversions between box formats, and intersection over union. Every tensor ends in 4 coordinates."""

from __future__ import annotations

import torch
from torch import Tensor


def cxcywh_to_xyxy(boxes_cxcywh: Tensor) -> Tensor:
    """Corners from center and size."""
    center, half_size = boxes_cxcywh[..., :2], boxes_cxcywh[..., 2:] / 2
    return torch.cat([center - half_size, center + half_size], dim=-1)


def xyxy_to_cxcywh(boxes_xyxy: Tensor) -> Tensor:
    """Center and size from corners."""
    top_left, bottom_right = boxes_xyxy[..., :2], boxes_xyxy[..., 2:]
    return torch.cat([(top_left + bottom_right) / 2, bottom_right - top_left], dim=-1)


def box_area(boxes_xyxy: Tensor) -> Tensor:
    """The area of each box; 0 if its corners are swapped."""
    size = (boxes_xyxy[..., 2:] - boxes_xyxy[..., :2]).clamp(min=0)
    return size[..., 0] * size[..., 1]


def broadcast_iou(a_xyxy: Tensor, b_xyxy: Tensor) -> Tensor:
    """Elementwise intersection over union of boxes whose leading dimensions broadcast; an empty box has IoU 0."""
    width = torch.minimum(a_xyxy[..., 2], b_xyxy[..., 2]) - torch.maximum(a_xyxy[..., 0], b_xyxy[..., 0])
    height = torch.minimum(a_xyxy[..., 3], b_xyxy[..., 3]) - torch.maximum(a_xyxy[..., 1], b_xyxy[..., 1])
    intersection = width.clamp(min=0) * height.clamp(min=0)
    union = box_area(a_xyxy) + box_area(b_xyxy) - intersection
    return torch.where(intersection > 0, intersection / torch.where(intersection > 0, union, 1), 0)
