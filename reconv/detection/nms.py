"""Non-maximum suppression of many lists at once, in plain tensor operations.

Owns the greedy rule. Refuses to know classes and images: lists are rows. Invariant: a box stays when no box before it
in its row stays and overlaps it by the threshold or more; no list is looped over, and memory has a bound.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.detection.box_ops import iou

MOST_PAIRS = 2**25  # of boxes whose overlaps are held at a time


def nms(boxes_xyxy: Tensor, valid: Tensor, threshold: float) -> Tensor:
    """Which boxes [rows, k, 4] stay, best first in each row; those not `valid` [rows, k] neither stay nor nms."""
    num_rows, k = valid.shape
    if num_rows == 0 or k == 0:
        return valid
    at_a_time = max(1, MOST_PAIRS // (k * k))
    pieces = zip(boxes_xyxy.split(at_a_time), valid.split(at_a_time), strict=True)
    return torch.cat([_greedy(boxes, counts, threshold) for boxes, counts in pieces])


def _greedy(boxes_xyxy: Tensor, valid: Tensor, threshold: float) -> Tensor:
    k = valid.shape[1]
    covers = iou(boxes_xyxy[:, :, None], boxes_xyxy[:, None]) >= threshold  # [rows, k, k]
    stays = valid.clone()
    for i in range(k - 1):
        stays[:, i + 1 :] &= ~(stays[:, i, None] & covers[:, i, i + 1 :])
    return stays
