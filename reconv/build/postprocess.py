"""From the outputs of a detector to detections, as in evaluation."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from reconv.build.model import detector_spec
from reconv.detection.anchors import generate_anchors
from reconv.detection.postprocess import Detections, PostprocessConfig, postprocess
from reconv.device import Device
from reconv.models.architecture import SSDOutput
from reconv.recipe.schema import Recipe


def build_anchors(recipe: Recipe) -> Tensor:
    """Anchors [num_anchors, 4] cxcywh for the feature maps of the recipe's network."""
    spec, size, boxes = detector_spec(recipe), recipe.data.preprocess.size, recipe.detection.anchors
    return generate_anchors(spec.map_pitches(size), spec.map_sides(size), boxes.scales, boxes.aspect_ratios)


def build_postprocess(recipe: Recipe, device: Device) -> Callable[[SSDOutput], Detections]:
    """The post-processing of a detector's outputs, as in evaluation."""
    anchors, config = build_anchors(recipe).to(device.torch), build_postprocess_config(recipe)

    def detections(outputs: SSDOutput) -> Detections:
        return postprocess(outputs.box_deltas, outputs.logits, anchors, recipe.detection.anchors.variances, config)

    return detections


def build_postprocess_config(recipe: Recipe) -> PostprocessConfig:
    """Settings that select a detector's detections from its raw outputs."""
    section = recipe.detection
    return PostprocessConfig(
        section.score_threshold, section.nms_iou, section.topk_candidates, section.detections_per_image
    )
