"""Object detection with SSD: anchor matching and two losses in training, detections in evaluation.

Losses are sums over images, each divided by the image's number of positive anchors. Shapes are fixed and nothing syncs
with the host, so a compiled or captured step can contain the losses.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.detection.box_coder import encode_boxes
from reconv.detection.box_ops import cxcywh_to_xyxy
from reconv.detection.matcher import hard_negatives, match_anchors
from reconv.detection.postprocess import Detections, PostprocessConfig, postprocess
from reconv.kernels.fused.ssd import SSDFeatureMaps
from reconv.metrics.detection import DetectionMetrics, GroundTruth
from reconv.models.architecture import SSDOutput
from reconv.tasks.base import LossSums


@dataclass(frozen=True, slots=True)
class MatchConfig:
    """Settings for matching anchors with ground-truth boxes and choosing negatives."""

    variances: tuple[float, float] = (0.1, 0.2)
    match_iou: float = 0.5
    negative_ratio: float = 3.0  # hard negatives per positive


class SSDLosses(NamedTuple):
    """The losses of each image [n], divided by its number of positive anchors."""

    classification: Tensor
    box_regression: Tensor


def ssd_losses(
    box_deltas: Tensor,
    logits: Tensor,
    boxes: Tensor,
    labels: Tensor,
    num_boxes: Tensor,
    anchors_cxcywh: Tensor,
    config: MatchConfig,
) -> SSDLosses:
    """The losses of n images from the model's outputs and padded ground-truth boxes; 0 for an image without positives.

    `box_deltas` is [n, num_anchors, 4], `logits` [n, num_anchors, 1 + num_classes], `boxes` [n, M, 4] xyxy, `labels`
    [n, M] from 1, and the first `num_boxes` [n] of the M boxes are real.
    """
    dtype = torch.promote_types(logits.dtype, torch.float32)
    box_deltas, logits = box_deltas.to(dtype), logits.to(dtype)
    with torch.no_grad():
        box_index, positive = match_anchors(cxcywh_to_xyxy(anchors_cxcywh), boxes, num_boxes, config.match_iou)
        matched_boxes = boxes.gather(1, box_index[:, :, None].expand(-1, -1, 4))
        target_deltas = encode_boxes(matched_boxes, anchors_cxcywh, config.variances).to(dtype)
        target_labels = torch.where(positive, labels.gather(1, box_index), 0)
        scale = 1 / positive.sum(dim=1).clamp(min=1).to(dtype)

    class_loss = F.cross_entropy(logits.flatten(0, 1), target_labels.flatten(), reduction="none").view_as(target_labels)
    counted = positive | hard_negatives(class_loss, positive, config.negative_ratio)
    box_loss = F.smooth_l1_loss(box_deltas, target_deltas, reduction="none").sum(dim=2)
    return SSDLosses(
        torch.where(counted, class_loss, 0).sum(dim=1) * scale,
        torch.where(positive, box_loss, 0).sum(dim=1) * scale,
    )


@dataclass(frozen=True, slots=True)
class DetectionTask:
    """SSD detection. Batches contain `images`, `boxes`, `labels` and `num_boxes`."""

    anchors_cxcywh: Tensor  # on the device of the batches
    match_config: MatchConfig
    postprocess_config: PostprocessConfig
    class_names: tuple[str, ...]  # background excluded
    truth: GroundTruth
    metric: str = "ap"
    loss_fn: Callable[..., SSDLosses] = ssd_losses  # or its compiled form

    def weight(self, batch: Batch) -> int:
        return len(batch)

    def loss(self, outputs: Any, batch: Batch) -> LossSums:
        """The sum over images of classification and box loss, in at least fp32."""
        losses = (
            self._fused_losses(outputs, batch) if isinstance(outputs, SSDFeatureMaps) else self._losses(outputs, batch)
        )
        class_loss, box_loss = losses.classification.sum(), losses.box_regression.sum()
        return LossSums(class_loss + box_loss, {"class_loss": class_loss.detach(), "box_loss": box_loss.detach()})

    def _fused_losses(self, outputs: SSDFeatureMaps, batch: Batch) -> SSDLosses:
        """The losses by fused kernels, where they support the outputs."""
        from reconv.kernels.ops.box_losses import AnchorLayout, GroundTruthBatch, box_losses, supports

        layout, config = AnchorLayout(outputs.per_cell, outputs.num_classes), self.match_config
        targets = (batch["boxes"], batch["labels"], batch["num_boxes"], self.anchors_cxcywh)
        truth = GroundTruthBatch(*targets, config.variances, config.match_iou, config.negative_ratio)
        if supports(outputs.maps, layout, truth):
            return SSDLosses(*box_losses(outputs.maps, outputs.biases, layout, truth))
        return self._losses(outputs.output(), batch)

    def _losses(self, outputs: SSDOutput, batch: Batch) -> SSDLosses:
        return self.loss_fn(
            outputs.box_deltas,
            outputs.logits,
            batch["boxes"],
            batch["labels"],
            batch["num_boxes"],
            self.anchors_cxcywh,
            self.match_config,
        )

    def metrics(self) -> DetectionMetrics:
        return DetectionMetrics(self.detections, self.truth, self.class_names)

    def detections(self, outputs: Any) -> Detections:
        """The detections in the model's outputs."""
        ssd_output: SSDOutput = outputs
        variances = self.match_config.variances
        return postprocess(
            ssd_output.box_deltas, ssd_output.logits, self.anchors_cxcywh, variances, self.postprocess_config
        )

    def train_metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        return {name: value / weight for name, value in sums.items()}
