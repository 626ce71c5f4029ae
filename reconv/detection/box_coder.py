"""What a network says of a default box: how far the true box's centre lies off it, and how much larger it is.

Owns the code and its inverse. Refuses to know which box belongs to which. Invariant: decoding an encoded box gives it
back, and the code of a box without size is finite.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from reconv.detection.box_ops import to_cxcywh, to_xyxy

EPSILON = 1e-8  # added to sizes, as published


def encode(boxes_xyxy: Tensor, anchors_cxcywh: Tensor, variances: Sequence[float]) -> Tensor:
    """Codes [..., 4]: offsets of centres in sizes of the anchor and logarithms of size ratios, over the variances."""
    boxes = to_cxcywh(boxes_xyxy)
    anchor_size = anchors_cxcywh[..., 2:] + EPSILON
    offset = (boxes[..., :2] - anchors_cxcywh[..., :2]) / anchor_size
    ratio = torch.log((boxes[..., 2:].clamp(min=0) + EPSILON) / anchor_size)
    return torch.cat([offset / variances[0], ratio / variances[1]], dim=-1)


def decode(codes: Tensor, anchors_cxcywh: Tensor, variances: Sequence[float]) -> Tensor:
    """The boxes [..., 4] xyxy that codes mean; not clipped."""
    centre = codes[..., :2] * variances[0] * anchors_cxcywh[..., 2:] + anchors_cxcywh[..., :2]
    size = torch.exp(codes[..., 2:] * variances[1]) * anchors_cxcywh[..., 2:]
    return to_xyxy(torch.cat([centre, size], dim=-1))
