"""From a detector's raw outputs to detections: score threshold, decoding, non-maximum suppression, top k."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reconv.detection.box_coder import decode_boxes
from reconv.detection.nms import batched_nms


@dataclass(frozen=True, slots=True)
class Detections:
    """The detections of n images, padded to K rows each.

    The first `counts[i]` rows of image i are its detections, best score first; the rows after them are zeros.
    """

    boxes_xyxy: Tensor  # [n, K, 4] float32, fractions of the input image's width and height
    scores: Tensor  # [n, K] float32
    labels: Tensor  # [n, K] int64: 1 to num_classes; 0 in padding rows
    counts: Tensor  # [n] int64

    def __len__(self) -> int:
        return int(self.counts.shape[0])

    def cpu(self) -> Detections:
        """A copy in host memory."""
        return Detections(self.boxes_xyxy.cpu(), self.scores.cpu(), self.labels.cpu(), self.counts.cpu())


@dataclass(frozen=True, slots=True)
class PostprocessConfig:
    """Settings of post-processing: which raw outputs become detections."""

    score_threshold: float = 0.05  # exclusive
    nms_iou: float = 0.5
    max_per_class: int = 200  # before non-maximum suppression
    max_per_image: int = 200


def postprocess(
    box_deltas: Tensor, logits: Tensor, anchors_cxcywh: Tensor, variances: Sequence[float], config: PostprocessConfig
) -> Detections:
    """Detections from box deltas [n, num_anchors, 4] and logits [n, num_anchors, 1 + num_classes]; 0 is background.

    Equal scores are ordered by anchor, then class, so the same outputs give the same detections on every device.
    """
    n, num_classes = logits.shape[0], logits.shape[2] - 1
    scores = logits.float().softmax(dim=2)[:, :, 1:]
    image, anchor, label = (scores > config.score_threshold).nonzero(as_tuple=True)
    score, group = scores[image, anchor, label], image * num_classes + label
    order, rank = _rank_in_group(score, group, n * num_classes)
    order = order[rank < config.max_per_class]
    rank = rank[rank < config.max_per_class]
    image, anchor, label, score, group = (x[order] for x in (image, anchor, label, score, group))
    boxes = decode_boxes(box_deltas[image, anchor].float(), anchors_cxcywh[anchor], variances)

    remains = _nms_by_group(boxes, group, rank, config.nms_iou)
    image, label, score, boxes, anchor = (x[remains] for x in (image, label, score, boxes, anchor))
    by_anchor = (anchor * num_classes + label).argsort(stable=True)
    image, label, score, boxes = (x[by_anchor] for x in (image, label, score, boxes))
    order, rank = _rank_in_group(score, image, n)
    order, rank = order[rank < config.max_per_image], rank[rank < config.max_per_image]
    image, label, score, boxes = (x[order] for x in (image, label, score, boxes))
    return _pad(image, rank, boxes, score, label, n, config.max_per_image)


def _rank_in_group(score: Tensor, group: Tensor, num_groups: int) -> tuple[Tensor, Tensor]:
    """The order that sorts by group, then by falling score, and the rank in its group of each item in that order."""
    order = score.argsort(descending=True, stable=True)
    order = order[group[order].argsort(stable=True)]
    counts = torch.bincount(group, minlength=num_groups)
    starts = counts.cumsum(0) - counts
    return order, torch.arange(len(order), device=group.device) - starts[group[order]]


def _nms_by_group(boxes_xyxy: Tensor, group: Tensor, rank: Tensor, iou_threshold: float) -> Tensor:
    """Mask of the boxes, sorted by group and rank, that remain. Each group becomes a padded row."""
    if len(group) == 0:
        return torch.ones_like(group, dtype=torch.bool)
    _, row, counts = torch.unique_consecutive(group, return_inverse=True, return_counts=True)
    shape = (len(counts), int(counts.max()))
    dense = boxes_xyxy.new_zeros((*shape, 4))
    dense[row, rank] = boxes_xyxy
    valid = torch.zeros(shape, dtype=torch.bool, device=group.device)
    valid[row, rank] = True
    return batched_nms(dense, valid, iou_threshold)[row, rank]


def _pad(
    image: Tensor, rank: Tensor, boxes: Tensor, score: Tensor, label: Tensor, n: int, max_per_image: int
) -> Detections:
    shape = (n, max_per_image)
    padded_boxes, padded_scores = boxes.new_zeros((*shape, 4)), score.new_zeros(shape)
    labels = label.new_zeros(shape)
    padded_boxes[image, rank] = boxes.clamp(0, 1)
    padded_scores[image, rank] = score
    labels[image, rank] = label + 1
    return Detections(padded_boxes, padded_scores, labels, torch.bincount(image, minlength=n))
