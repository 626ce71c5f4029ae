"""Loop implementations of reconv.detection, one box at a time."""

from __future__ import annotations

import numpy as np

Box = tuple[float, float, float, float]


def iou(a: Box, b: Box) -> np.float32:
    """Intersection over union in float32, in the same order of operations as the batched version."""
    a32, b32 = np.asarray(a, np.float32), np.asarray(b, np.float32)
    zero = np.float32(0)
    width = max(min(a32[2], b32[2]) - max(a32[0], b32[0]), zero)
    height = max(min(a32[3], b32[3]) - max(a32[1], b32[1]), zero)
    intersection = width * height
    if intersection <= 0:
        return zero
    area_a = max(a32[2] - a32[0], zero) * max(a32[3] - a32[1], zero)
    area_b = max(b32[2] - b32[0], zero) * max(b32[3] - b32[1], zero)
    return np.float32(intersection / (area_a + area_b - intersection))


def match_anchors(anchors: list[Box], boxes: list[Box], match_iou: float) -> list[int | None]:
    """The ground-truth box of each anchor, or None."""
    matched: list[int | None] = []
    for anchor in anchors:
        ious = [iou(box, anchor) for box in boxes]
        best = max(range(len(boxes)), key=lambda i: (ious[i], -i), default=None)
        matched.append(best if best is not None and ious[best] >= match_iou else None)
    for i in reversed(range(len(boxes))):  # the first box is assigned last, so it wins
        ious = [iou(boxes[i], anchor) for anchor in anchors]
        best = max(range(len(anchors)), key=lambda j: (ious[j], -j))
        if ious[best] > 0:
            matched[best] = i
    return matched


def hard_negatives(losses: list[float], positive: list[bool], negative_ratio: float) -> list[bool]:
    """The negatives with the highest losses."""
    negatives = sorted((j for j, is_positive in enumerate(positive) if not is_positive), key=lambda j: (-losses[j], j))
    selected = set(negatives[: int(negative_ratio * sum(positive))])
    return [j in selected for j in range(len(losses))]


def nms(boxes: list[Box], iou_threshold: float) -> list[int]:
    """Greedy non-maximum suppression of boxes sorted by falling score."""
    kept: list[int] = []
    for i, box in enumerate(boxes):
        if all(iou(boxes[j], box) < iou_threshold for j in kept):
            kept.append(i)
    return kept
