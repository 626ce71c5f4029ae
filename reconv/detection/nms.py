"""Greedy non-maximum suppression of many lists of boxes at once, in plain tensor operations."""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.detection.box_ops import broadcast_iou

MAX_PAIRS = 2**25  # box pairs whose IoU is in memory at a time


def batched_nms(boxes_xyxy: Tensor, valid: Tensor, iou_threshold: float) -> Tensor:
    """Mask [num_lists, k] of the boxes [num_lists, k, 4] that remain.

    Each list is sorted by falling score. A box is dropped if its IoU with an earlier box that remains is at least
    `iou_threshold`. Boxes that are not `valid` [num_lists, k] neither remain nor drop others.
    """
    num_lists, k = valid.shape
    if num_lists == 0 or k == 0:
        return valid
    chunk_size = max(1, MAX_PAIRS // (k * k))
    chunks = zip(boxes_xyxy.split(chunk_size), valid.split(chunk_size), strict=True)
    return torch.cat([_greedy_nms(boxes, is_valid, iou_threshold) for boxes, is_valid in chunks])


def _greedy_nms(boxes_xyxy: Tensor, valid: Tensor, iou_threshold: float) -> Tensor:
    k = valid.shape[1]
    overlaps = broadcast_iou(boxes_xyxy[:, :, None], boxes_xyxy[:, None]) >= iou_threshold  # [num_lists, k, k]
    remains = valid.clone()
    for i in range(k - 1):
        remains[:, i + 1 :] &= ~(remains[:, i, None] & overlaps[:, i, i + 1 :])
    return remains
