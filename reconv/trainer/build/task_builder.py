"""Builders of what detection has beside the parts of every run: default boxes, the task, detections of answers.

Owns their wiring to a recipe. Refuses to know training. Invariant: training, evaluation and prediction have the same
default boxes, which fit the maps of the recipe's network.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from torch import Tensor

from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.dataset import Dataset, LabelError
from reconv.detection.anchors import generate_anchors
from reconv.detection.postprocess import Detections, PostprocessConfig, postprocess
from reconv.device import Device
from reconv.errors import DataError, RecipeError
from reconv.metrics.coco_eval import require_coco_eval
from reconv.models import model_spec
from reconv.models.architecture import SSDOutput
from reconv.models.ssd import TABLE as DETECTORS
from reconv.models.ssd import SSDSpec
from reconv.recipe.schema import Recipe
from reconv.tasks.detection import DetectionTask, MatchConfig, ssd_losses

Compile = Callable[[Callable[..., Any]], Callable[..., Any]]


def detector_options(recipe: Recipe) -> dict[str, Any]:
    """The options of the recipe's network that follow from its default boxes."""
    if "boxes_per_cell" in recipe.model.options:
        raise RecipeError(
            "model.options.boxes_per_cell: the number of boxes follows from detection.anchors.aspect_ratios",
            then="leave it out",
        )
    return {"boxes_per_cell": list(recipe.detection.anchors.per_cell)}


def check_detector(recipe: Recipe) -> None:
    """Refuse a network that does not answer with boxes, or whose maps would be empty."""
    _spec(recipe).map_sides(recipe.data.preprocess.size)


def check_scores(recipe: Recipe) -> None:
    """Refuse to judge a run by scores that nothing here can compute."""
    is_scored = recipe.task == "detection" and recipe.evaluate.every != "off"
    if is_scored and recipe.detection.metric.startswith("ap"):
        require_coco_eval(f"detection.metric: {recipe.detection.metric}")


def build_anchors(recipe: Recipe) -> Tensor:
    """Default boxes [num_boxes, 4] cxcywh for the maps of the recipe's network."""
    spec, size, boxes = _spec(recipe), recipe.data.preprocess.size, recipe.detection.anchors
    return generate_anchors(spec.map_pitches(size), spec.map_sides(size), boxes.scales, boxes.aspect_ratios)


def with_boxes(source: Dataset) -> DetectionDataset:
    """The source as one of images with boxes, or a refusal."""
    if not isinstance(source, DetectionDataset):
        raise DataError(
            "these data have no boxes",
            where=source.origin,
            why="they tell the class of an image, and the task is detection",
            then="reconv recipes lists recipes for classification",
        )
    return source


def refuse_nothing_to_find(source: DetectionDataset) -> None:
    """Refuse a validation set that no detector could score on."""
    unreadable: DataError | None = None
    for index in range(len(source)):
        try:
            said = source.annotation(index)
        except LabelError:
            raise
        except DataError as error:  # whether the run bears that is decided when the image is evaluated
            unreadable = unreadable or error
            continue
        if (~said.is_crowd & ~said.difficult).any():
            return
    raise unreadable or DataError(
        "the validation set has no object that must be found",
        where=source.origin,
        why="its images have no boxes, or crowds and difficult objects only",
        then="reconv data check tells what is in the data; a larger evaluate.num_samples, where that is set",
    )


def boxes_left_out(source: Dataset, max_boxes: int) -> str:
    """What does not fit into a batch, in words; empty where all does."""
    counts = source.box_counts() if isinstance(source, DetectionDataset) else np.zeros(0, np.int64)
    beyond = np.maximum(counts - max_boxes, 0)
    if not beyond.any():
        return ""
    return (
        f"{int((beyond > 0).sum()):,} training images have more than {max_boxes:,} boxes (detection.max_gt_boxes): "
        f"up to {int(beyond.sum()):,} of {int(counts.sum()):,} boxes are left out, the last of each image"
    )


def build_detection(recipe: Recipe, source: Dataset, device: Device, compiled: Compile | None) -> DetectionTask:
    """The task, scored against the annotations of a validation set."""
    section = recipe.detection
    return DetectionTask(
        anchors_cxcywh=build_anchors(recipe).to(device.torch),
        match_config=MatchConfig(section.anchors.variances, section.match_iou, section.negative_ratio),
        postprocess_config=_keep(recipe),
        class_names=tuple(source.class_names),
        truth=with_boxes(source).annotation,
        metric=section.metric,
        loss_fn=compiled(ssd_losses) if compiled is not None else ssd_losses,
    )


def build_postprocess(recipe: Recipe, device: Device) -> Callable[[SSDOutput], Detections]:
    """What makes detections of a network's answers, as evaluation does."""
    anchors = build_anchors(recipe).to(device.torch)

    def detections(answers: SSDOutput) -> Detections:
        return postprocess(
            answers.box_deltas, answers.logits, anchors, recipe.detection.anchors.variances, _keep(recipe)
        )

    return detections


def _keep(recipe: Recipe) -> PostprocessConfig:
    section = recipe.detection
    return PostprocessConfig(
        section.score_threshold, section.nms_iou, section.topk_candidates, section.detections_per_image
    )


def _spec(recipe: Recipe) -> SSDSpec:
    options = {**recipe.model.options, **detector_options(recipe)}
    spec = model_spec(recipe.model.name, **options) if recipe.model.name in DETECTORS else None
    if not isinstance(spec, SSDSpec):
        raise RecipeError(
            f"{recipe.model.name} does not answer with boxes, and the task is detection",
            where="model.name",
            then=f"one of: {', '.join(DETECTORS)}",
        )
    return spec
