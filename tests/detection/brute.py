"""One box at a time: slow versions of what reconv.detection does in batches."""

from __future__ import annotations

import numpy as np

Box = tuple[float, float, float, float]


def overlap(a: Box, b: Box) -> np.float32:
    """Intersection over union in float32, as the batched version computes it."""
    a32, b32 = np.asarray(a, np.float32), np.asarray(b, np.float32)
    zero = np.float32(0)
    width = max(min(a32[2], b32[2]) - max(a32[0], b32[0]), zero)
    height = max(min(a32[3], b32[3]) - max(a32[1], b32[1]), zero)
    common = width * height
    if common <= 0:
        return zero
    area_a = max(a32[2] - a32[0], zero) * max(a32[3] - a32[1], zero)
    area_b = max(b32[2] - b32[0], zero) * max(b32[3] - b32[1], zero)
    return np.float32(common / (area_a + area_b - common))


def match(anchors: list[Box], boxes: list[Box], threshold: float) -> list[int | None]:
    """The true box of each default box, by the rule read aloud."""
    owner: list[int | None] = []
    for anchor in anchors:
        overlaps = [overlap(box, anchor) for box in boxes]
        best = max(range(len(boxes)), key=lambda i: (overlaps[i], -i), default=None)
        owner.append(best if best is not None and overlaps[best] >= threshold else None)
    for i in reversed(range(len(boxes))):  # the first claim is made last, so that it stays
        overlaps = [overlap(boxes[i], anchor) for anchor in anchors]
        best = max(range(len(anchors)), key=lambda j: (overlaps[j], -j))
        if overlaps[best] > 0:
            owner[best] = i
    return owner


def hard_negatives(losses: list[float], positive: list[bool], ratio: float) -> list[bool]:
    """The negatives with the highest losses, so many for each positive."""
    negatives = sorted((j for j, is_positive in enumerate(positive) if not is_positive), key=lambda j: (-losses[j], j))
    chosen = set(negatives[: int(ratio * sum(positive))])
    return [j in chosen for j in range(len(losses))]


def suppress(boxes: list[Box], threshold: float) -> list[int]:
    """Greedy suppression of boxes that come best first."""
    kept: list[int] = []
    for i, box in enumerate(boxes):
        if all(overlap(boxes[j], box) < threshold for j in kept):
            kept.append(i)
    return kept
