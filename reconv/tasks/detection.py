"""Object detection with default boxes: matching and two losses in training, detections in evaluation.

Owns the losses and how a network's answers become detections. Refuses to know loops, devices, networks and scores.
Invariant: everything returned to the engine is a sum over images, each image's losses divided by its own number of
positives; shapes are fixed and nothing is read by the host, so that a compiled or recorded step may hold it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.batch import Batch
from reconv.detection.box_coder import encode_boxes
from reconv.detection.box_ops import cxcywh_to_xyxy
from reconv.detection.matcher import hard_negatives, match_anchors
from reconv.detection.postprocess import Detections, PostprocessConfig, postprocess
from reconv.kernels.fused_modules.fused_ssd import SSDFeatureMaps
from reconv.metrics.detection_metrics import DetectionMetrics, Truth
from reconv.models.architecture import SSDOutput
from reconv.tasks.task import LossSums


@dataclass(frozen=True, slots=True)
class MatchConfig:
    """How default boxes are matched and learned."""

    variances: tuple[float, float] = (0.1, 0.2)
    threshold: float = 0.5  # of the overlap that makes a default box positive
    negatives: float = 3.0  # for each positive


class Losses(NamedTuple):
    """The two losses of each image [n], over its number of positives."""

    classes: Tensor
    boxes: Tensor


def image_losses(
    codes: Tensor,
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    num_boxes: Tensor,
    anchors_cxcywh: Tensor,
    rules: MatchConfig,
) -> Losses:
    """The losses of n images from their answers and their padded true boxes; 0 for an image without a positive."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    codes, logits = codes.to(dtype), logits.to(dtype)
    with torch.no_grad():
        row, positive = match_anchors(cxcywh_to_xyxy(anchors_cxcywh), boxes, num_boxes, rules.threshold)
        own_boxes = boxes.gather(1, row[:, :, None].expand(-1, -1, 4))
        wanted_codes = encode_boxes(own_boxes, anchors_cxcywh, rules.variances).to(dtype)
        wanted_class = torch.where(positive, labels.gather(1, row), 0)
        share = 1 / positive.sum(dim=1).clamp(min=1).to(dtype)

    by_class = F.cross_entropy(logits.flatten(0, 1), wanted_class.flatten(), reduction="none").view_as(wanted_class)
    counted = positive | hard_negatives(by_class, positive, rules.negatives)
    by_box = F.smooth_l1_loss(codes, wanted_codes, reduction="none").sum(dim=2)
    return Losses(
        torch.where(counted, by_class, 0).sum(dim=1) * share,
        torch.where(positive, by_box, 0).sum(dim=1) * share,
    )


@dataclass(frozen=True, slots=True)
class DetectionTask:
    """The task: batches with `images`, `boxes`, `labels` and `num_boxes`."""

    anchors_cxcywh: Tensor  # on the device of the batches
    rules: MatchConfig
    keep: PostprocessConfig
    class_names: tuple[str, ...]  # without the background
    truth: Truth
    metric: str = "ap"
    losses: Callable[..., Losses] = image_losses  # or a compiled form of it

    def weight(self, batch: Batch) -> int:
        return len(batch)

    def loss(self, outputs: Any, batch: Batch) -> LossSums:
        """The sum over images of class loss and box loss, in at least fp32."""
        losses = (
            self._map_losses(outputs, batch) if isinstance(outputs, SSDFeatureMaps) else self._losses(outputs, batch)
        )
        classes, boxes = losses.classes.sum(), losses.boxes.sum()
        return LossSums(classes + boxes, {"class_loss": classes.detach(), "box_loss": boxes.detach()})

    def _map_losses(self, outputs: SSDFeatureMaps, batch: Batch) -> Losses:
        """The losses by kernels, where those take all of it."""
        from reconv.kernels.box_losses.ops import AnchorLayout, GroundTruthBatch, box_losses, supports

        layout, rules = AnchorLayout(outputs.per_cell, outputs.num_classes), self.rules
        shown = (batch["boxes"], batch["labels"], batch["num_boxes"], self.anchors_cxcywh)
        truth = GroundTruthBatch(*shown, rules.variances, rules.threshold, rules.negatives)
        if supports(outputs.maps, layout, truth):
            return Losses(*box_losses(outputs.maps, outputs.biases, layout, truth))
        return self._losses(outputs.output(), batch)

    def _losses(self, answers: SSDOutput, batch: Batch) -> Losses:
        return self.losses(
            answers.codes,
            answers.logits,
            batch["boxes"],
            batch["labels"],
            batch["num_boxes"],
            self.anchors_cxcywh,
            self.rules,
        )

    def metrics(self) -> DetectionMetrics:
        return DetectionMetrics(self.detections, self.truth, self.class_names)

    def detections(self, outputs: Any) -> Detections:
        """What a network's answers say was found."""
        answers: SSDOutput = outputs
        return postprocess(answers.codes, answers.logits, self.anchors_cxcywh, self.rules.variances, self.keep)

    def train_metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        return {name: value / weight for name, value in sums.items()}
