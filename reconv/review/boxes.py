"""Wrong boxes by a detector: objects without a box, boxes without an object, shifted boxes and wrong classes.

As in ObjectLab (Tkachenko, Thyagarajan and Mueller 2023), a box is suspicious where a detector is sure of something
else.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from reconv.build.data import as_detection_dataset, build_eval_loader
from reconv.build.postprocess import build_postprocess
from reconv.core.machine import Machine, cores_per_process
from reconv.data.dataset import F64, Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.detection.box_ops import broadcast_iou
from reconv.inference.predictor import Predictor
from reconv.metrics.detection import DetectionMetrics
from reconv.metrics.detection_matches import ImageDetections
from reconv.recipe.workers import AUTO_THREADS, IN_MEMORY
from reconv.review.findings import ReviewFinding, SuspectBox
from reconv.review.images import ReviewedImages
from reconv.tasks.evaluation import evaluate

MIN_SCORE = 0.5  # of a detection that contradicts the annotation
MIN_SEEN = 0.1  # of a detection that shows that there is something at a box
MATCH_IOU = 0.6  # from here on a box is where the detector sees it
TOUCH_IOU = 0.3  # from here on a detection is of the object of a box


def detect_boxes(predictor: Predictor, dataset: Dataset) -> list[ImageDetections]:
    """The annotation and the detections of each image of a dataset that can be read."""
    boxed = as_detection_dataset(dataset)
    postprocess = build_postprocess(predictor.recipe, predictor.device)
    metrics = DetectionMetrics(postprocess, boxed.annotation, boxed.class_names)
    threads = 0 if dataset.kind in IN_MEMORY else min(cores_per_process(Machine(), 1), AUTO_THREADS)
    bad = BadSamples(len(dataset) + 1)
    loader = build_eval_loader(
        predictor.recipe, dataset, predictor.device, predictor.recipe.evaluate.batch_size, threads, bad
    )
    evaluate(predictor.inference_step, metrics, loader)
    return metrics.images()


def box_findings(images: ReviewedImages, found: Sequence[tuple[int, ImageDetections]]) -> list[ReviewFinding]:
    """Suspicious boxes of images [(row, detections)], the highest score first."""
    findings = [
        ReviewFinding("box", row, score, "exclude", proposed, given, note=note, box=box)
        for row, image in found
        for score, given, proposed, note, box in _of_image(image, images.class_names)
    ]
    return sorted(findings, key=lambda finding: (-finding.score, finding.row))


def _of_image(image: ImageDetections, names: Sequence[str]) -> Iterator[tuple[float, str, str, str, SuspectBox]]:
    """Score, class in the data, class as detected, words and box of everything suspicious in an image."""
    truth = image.truth
    boxes, labels = truth.boxes_xyxy.astype(np.float64), truth.labels
    iou = _iou(image.boxes_xyxy, boxes)  # [detections, boxes]
    taken: set[int] = set()
    for box in range(len(labels)):
        if truth.is_crowd[box] or truth.difficult[box]:
            continue
        given, corners = names[labels[box]], _corners(boxes[box])
        here = np.flatnonzero(iou[:, box] >= TOUCH_IOU)
        same = here[image.labels[here] == labels[box]]
        others = here[(image.labels[here] != labels[box]) & (iou[here, box] >= MATCH_IOU)]
        best_same = float(image.scores[same].max(initial=0.0))
        seen = float(image.scores[here].max(initial=0.0))
        if len(others) and image.scores[others[0]] >= MIN_SCORE and image.scores[others[0]] > best_same:
            other, score = int(others[0]), float(image.scores[others[0]]) * (1 - best_same)
            taken.add(other)
            note = f"wrong class: detected as {names[image.labels[other]]} with {100 * image.scores[other]:.0f} %"
            detected = _corners(image.boxes_xyxy[other])
            suspect = SuspectBox("wrong class", corners, detected, truth)
            yield score, given, names[image.labels[other]], note, suspect
        elif len(same) and image.scores[same[0]] >= MIN_SCORE and iou[same, box].max() < MATCH_IOU:
            overlap = float(iou[same[0], box])
            note = (
                f"shifted: the {given} is detected with {100 * image.scores[same[0]]:.0f} % at an IoU of {overlap:.2f}"
            )
            suspect = SuspectBox("shifted", corners, _corners(image.boxes_xyxy[same[0]]), truth)
            yield float(image.scores[same[0]]) * (1 - overlap), given, given, note, suspect
        elif seen < MIN_SEEN:
            note = f"extra: nothing is detected here with more than {100 * seen:.0f} %"
            yield (1 - seen / MIN_SEEN) * 0.5, given, "", note, SuspectBox("extra", corners, None, truth)
    for at in np.flatnonzero(image.scores >= MIN_SCORE).tolist():
        if at not in taken and (not len(labels) or iou[at].max() < TOUCH_IOU) and _is_first(image, at):
            name, corners = names[image.labels[at]], _corners(image.boxes_xyxy[at])
            note = f"missing: a {name} is detected here with {100 * image.scores[at]:.0f} %"
            yield float(image.scores[at]), "", name, note, SuspectBox("missing", corners, None, truth)


def _is_first(image: ImageDetections, at: int) -> bool:
    """True if no better-scored detection is in the same place."""
    overlap = _iou(image.boxes_xyxy[at : at + 1], image.boxes_xyxy[:at])
    return bool(overlap.max(initial=0.0) < MATCH_IOU)


def _iou(a_xyxy: F64, b_xyxy: F64) -> F64:
    """The IoU of each box with each other box [a, b]."""
    iou: F64 = broadcast_iou(torch.from_numpy(a_xyxy)[:, None], torch.from_numpy(b_xyxy)[None]).numpy()
    return iou


def _corners(box: F64) -> tuple[float, float, float, float]:
    left, top, right, bottom = (float(value) for value in box)
    return left, top, right, bottom
