"""Box regression targets: encode boxes relative to anchors, and decode predicted deltas."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reconv.detection.box_ops import cxcywh_to_xyxy, xyxy_to_cxcywh

EPSILON = 1e-8  # added to sizes, as in NVIDIA's SSD; keeps the deltas of an empty box finite


def encode_boxes(boxes_xyxy: Tensor, anchors_cxcywh: Tensor, variances: Sequence[float]) -> Tensor:
    """Box deltas [..., 4]: center offsets in anchor sizes and log size ratios, divided by the variances."""
    boxes = xyxy_to_cxcywh(boxes_xyxy)
    anchor_size = anchors_cxcywh[..., 2:] + EPSILON
    offset = (boxes[..., :2] - anchors_cxcywh[..., :2]) / anchor_size
    log_ratio = torch.log((boxes[..., 2:].clamp(min=0) + EPSILON) / anchor_size)
    return torch.cat([offset / variances[0], log_ratio / variances[1]], dim=-1)


def decode_boxes(box_deltas: Tensor, anchors_cxcywh: Tensor, variances: Sequence[float]) -> Tensor:
    """The boxes [..., 4] xyxy of predicted deltas, not clipped."""
    center = box_deltas[..., :2] * variances[0] * anchors_cxcywh[..., 2:] + anchors_cxcywh[..., :2]
    size = torch.exp(box_deltas[..., 2:] * variances[1]) * anchors_cxcywh[..., 2:]
    return cxcywh_to_xyxy(torch.cat([center, size], dim=-1))
