"""Matching of anchors with ground-truth boxes, and the negatives that count in the class loss."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reconv.detection.box_ops import broadcast_iou


class MatchResult(NamedTuple):
    """The ground-truth box of each anchor of each image."""

    box_index: Tensor  # [n, num_anchors] int64; arbitrary where not positive
    positive: Tensor  # [n, num_anchors] bool


def match_anchors(anchors_xyxy: Tensor, boxes_xyxy: Tensor, num_boxes: Tensor, match_iou: float) -> MatchResult:
    """Match anchors [num_anchors, 4] with ground-truth boxes [n, M, 4], of which the first `num_boxes` [n] are real.

    An anchor matches the box it overlaps most, if their IoU is at least `match_iou`. In addition each box matches the
    anchor it overlaps most, whatever the IoU, unless it overlaps none; if several boxes do so for one anchor, the first
    wins. Ties go to the lower index. Output shapes depend on input shapes only and nothing syncs with the host, so a
    compiled or captured step can contain it.
    """
    n, max_boxes = boxes_xyxy.shape[:2]
    num_anchors = anchors_xyxy.shape[0]
    box_indices = torch.arange(max_boxes, device=boxes_xyxy.device)
    is_real = box_indices < num_boxes[:, None]
    iou = broadcast_iou(boxes_xyxy[:, :, None], anchors_xyxy[None, None])  # [n, M, num_anchors]
    iou = torch.where(is_real[:, :, None], iou, -1.0)

    best_iou, best_box = iou.max(dim=1)
    iou_of_best_anchor, best_anchor = iou.max(dim=2)
    # The lowest index of the boxes whose best anchor this is; max_boxes if there is none.
    forced = torch.where(iou_of_best_anchor > 0, box_indices, max_boxes)
    none = torch.full((n, num_anchors), max_boxes, dtype=torch.int64, device=boxes_xyxy.device)
    forced_box = none.scatter_reduce(1, best_anchor, forced, "amin")

    is_forced = forced_box < max_boxes
    box_index = torch.where(is_forced, forced_box, best_box)
    return MatchResult(box_index, is_forced | (best_iou >= match_iou))


def hard_negatives(losses: Tensor, positive: Tensor, negative_ratio: float) -> Tensor:
    """Mask [n, num_anchors] of the negatives with the highest of `losses` [n, num_anchors].

    An image with p positives has min(negative_ratio * p, num_negatives) of them. Ties go to the lower index.
    """
    num_selected = (positive.sum(dim=1, keepdim=True) * negative_ratio).floor()
    # Losses are at least 0, so positives sort behind every negative.
    order = losses.detach().masked_fill(positive, -1.0).argsort(dim=1, descending=True, stable=True)
    is_selected = torch.arange(losses.shape[1], device=losses.device) < num_selected
    selected = torch.zeros_like(positive).scatter(1, order, is_selected.expand_as(positive))
    return selected & ~positive
