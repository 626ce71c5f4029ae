"""From a detector's raw answers to detections: decode, keep what is likely, nms doubles, keep the best.

Owns the order of those and their ties. Refuses to know networks and files. Invariant: the same answers give the same
detections on every device; of equal scores the lower default box, then the lower class, comes first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reconv.detection.box_coder import decode
from reconv.detection.detections import Detections
from reconv.detection.nms import nms


@dataclass(frozen=True, slots=True)
class PostprocessConfig:
    """What is kept of a network's answers."""

    score: float = 0.05  # scores must be above
    nms: float = 0.5  # overlap with a better box of the class that drops a box
    max_per_class: int = 200  # before suppression
    max_per_image: int = 200


def postprocess(
    codes: Tensor, logits: Tensor, anchors_cxcywh: Tensor, variances: Sequence[float], keep: PostprocessConfig
) -> Detections:
    """Detections of codes [n, num_anchors, 4] and logits [n, num_anchors, classes], class 0 being background."""
    n, num_classes = logits.shape[0], logits.shape[2] - 1
    scores = logits.float().softmax(dim=2)[:, :, 1:]
    image, anchor, label = (scores > keep.score).nonzero(as_tuple=True)  # by image, then default box, then class
    score, group = scores[image, anchor, label], image * num_classes + label
    order, rank = _ranked(score, group, n * num_classes)
    order = order[rank < keep.max_per_class]
    rank = rank[rank < keep.max_per_class]
    image, anchor, label, score, group = (x[order] for x in (image, anchor, label, score, group))
    boxes = decode(codes[image, anchor].float(), anchors_cxcywh[anchor], variances)

    stays = _suppressed(boxes, group, rank, keep.nms)
    image, label, score, boxes, anchor = (x[stays] for x in (image, label, score, boxes, anchor))
    by_anchor = (anchor * num_classes + label).argsort(stable=True)
    image, label, score, boxes = (x[by_anchor] for x in (image, label, score, boxes))
    order, rank = _ranked(score, image, n)
    order, rank = order[rank < keep.max_per_image], rank[rank < keep.max_per_image]
    image, label, score, boxes = (x[order] for x in (image, label, score, boxes))
    return _padded(image, rank, boxes, score, label, n, keep.max_per_image)


def _ranked(score: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The order that sorts by group and then by falling score, and each item's place in its group, in that order."""
    order = score.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    counts = torch.bincount(group, minlength=num_groups)
    starts = counts.cumsum(0) - counts
    return order, torch.arange(len(order), device=group.device) - starts[group[order]]


def _suppressed(boxes_xyxy: Tensor, group: Tensor, rank: Tensor, threshold: float) -> Tensor:
    """Which of the boxes, sorted by group and rank, stay: groups become rows as long as the longest."""
    if len(group) == 0:
        return torch.ones_like(group, dtype=torch.bool)
    _, row, counts = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    shape = (len(counts), int(counts.max()))
    dense = boxes_xyxy.new_zeros((*shape, 4))
    dense[row, rank] = boxes_xyxy
    valid = torch.zeros(shape, dtype=torch.bool, device=group.device)
    valid[row, rank] = True
    return nms(dense, valid, threshold)[row, rank]


def _padded(
    image: Tensor, rank: Tensor, boxes: Tensor, score: Tensor, label: Tensor, n: int, max_per_image: int
) -> Detections:
    shape = (n, max_per_image)
    padded_boxes, padded_scores = boxes.new_zeros((*shape, 4)), score.new_zeros(shape)
    labels = label.new_zeros(shape)
    padded_boxes[image, rank] = boxes.clamp(0, 1)
    padded_scores[image, rank] = score
    labels[image, rank] = label + 1
    return Detections(padded_boxes, padded_scores, labels, torch.bincount(image, minlength=n))
