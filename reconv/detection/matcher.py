"""Which true box each default box stands for.

Owns the rule and its ties. Refuses to know classes and losses. Invariant: shapes depend on shapes alone and nothing is
read back to the host, so that a compiled step may hold it.

The rule: a default box belongs to the true box it overlaps most (of equals the first), if that is at least the
threshold. Besides, each true box claims the default box it overlaps most (of equals the first), whatever the overlap;
of several claims on one default box the first true box has it. A true box that overlaps nothing claims nothing.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from reconv.detection.box_ops import iou


class MatchResult(NamedTuple):
    """For each default box of each image: the true box it belongs to, and whether it does."""

    row: Tensor  # [n, num_anchors] int64; some row of the true boxes where not positive
    positive: Tensor  # [n, num_anchors] bool


def match(anchors_xyxy: Tensor, boxes_xyxy: Tensor, num_boxes: Tensor, threshold: float) -> MatchResult:
    """Match default boxes [num_anchors, 4] with true boxes [n, M, 4], of which the first `num_boxes` [n] count."""
    n, num_rows = boxes_xyxy.shape[:2]
    num_anchors = anchors_xyxy.shape[0]
    rows = torch.arange(num_rows, device=boxes_xyxy.device)
    counts = rows < num_boxes[:, None]
    overlap = iou(boxes_xyxy[:, :, None], anchors_xyxy[None, None])  # [n, M, num_anchors]
    overlap = torch.where(counts[:, :, None], overlap, -1.0)

    best_overlap, best_row = overlap.max(dim=1)
    claimed_overlap, claimed_anchor = overlap.max(dim=2)
    # The lowest row of those that claim a default box; num_rows: nobody does.
    claims = torch.where(claimed_overlap > 0, rows, num_rows)
    nobody = torch.full((n, num_anchors), num_rows, dtype=torch.int64, device=boxes_xyxy.device)
    claimant = nobody.scatter_reduce(1, claimed_anchor, claims, "amin")

    is_claimed = claimant < num_rows
    row = torch.where(is_claimed, claimant, best_row)
    return MatchResult(row, is_claimed | (best_overlap >= threshold))
