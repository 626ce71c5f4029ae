"""The IoU of every detection with the ground truth: the table behind VOC metrics, curves and error kinds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.detection.annotation import Annotation

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

NO_MATCH = -1
CROWD_OVERLAP = 0.5  # of a detection's area inside a crowd of its class: then it is ignored


@dataclass(frozen=True, slots=True, eq=False)
class ImageDetections:
    """The ground truth and the detections of one image, in pixels of the original image."""

    index: int  # in the validation set
    truth: Annotation
    boxes_xyxy: F64  # [k, 4], best score first
    scores: F64  # [k]
    labels: I64  # [k], from 0, as in the ground truth


@dataclass(frozen=True, slots=True, eq=False)
class DetectionMatches:
    """D detections, best score first (ties in image order), and G ground-truth boxes, crowds excluded."""

    image_index: I64  # [D] position in the sequence of images
    labels: I64  # [D]
    scores: F64  # [D]
    iou: F64  # [D] the highest IoU with a ground-truth box of the same class; 0: none
    match: I64  # [D] index of that box, or NO_MATCH
    other_iou: F64  # [D] the highest IoU with a ground-truth box of another class; 0: none
    other_match: I64  # [D] index of that box, or NO_MATCH
    in_crowd: Bools  # [D]
    truth_labels: I64  # [G]
    truth_areas: F64  # [G]
    difficult: Bools  # [G]

    def outcomes(self, iou_threshold: float) -> MatchOutcomes:
        """The outcome of each detection at an IoU threshold. A ground-truth box goes to its best-scored detection."""
        hits = self.iou >= iou_threshold
        is_first = np.zeros(len(hits), bool)
        if hits.any():
            rows = np.flatnonzero(hits)
            _, first = np.unique(self.match[rows], return_index=True)
            is_first[rows[first]] = True
        counts = np.zeros(len(hits), bool)
        counts[hits] = ~self.difficult[self.match[hits]]
        return MatchOutcomes(
            true_positive=is_first & counts,
            duplicate=hits & counts & ~is_first,
            ignored=(hits & ~counts) | (~hits & self.in_crowd),
        )


@dataclass(frozen=True, slots=True, eq=False)
class MatchOutcomes:
    """Outcome of each of D detections, as masks [D]; one in no mask is a false positive that matches nothing."""

    true_positive: Bools
    duplicate: Bools  # of an object that a better-scored detection found
    ignored: Bools  # on a difficult object or in a crowd


def match_detections(images: Sequence[ImageDetections]) -> DetectionMatches:
    """Match the detections of all images with their ground truth."""
    matched = [_match_image(image) for image in images]
    num_truths = np.cumsum([0, *(len(part.truth_labels) for part in matched)])
    counts = [len(image.scores) for image in images]
    offsets = np.repeat(num_truths[:-1], counts)
    scores = _concatenate([image.scores for image in images], np.float64)
    order = np.argsort(-scores, kind="stable")
    match = _concatenate([part.match for part in matched], np.int64)
    other_match = _concatenate([part.other_match for part in matched], np.int64)
    return DetectionMatches(
        image_index=np.repeat(np.arange(len(images)), counts)[order],
        labels=_concatenate([image.labels for image in images], np.int64)[order],
        scores=scores[order],
        iou=_concatenate([part.iou for part in matched], np.float64)[order],
        match=np.where(match == NO_MATCH, NO_MATCH, match + offsets)[order],
        other_iou=_concatenate([part.other_iou for part in matched], np.float64)[order],
        other_match=np.where(other_match == NO_MATCH, NO_MATCH, other_match + offsets)[order],
        in_crowd=_concatenate([part.in_crowd for part in matched], np.bool_)[order],
        truth_labels=_concatenate([part.truth_labels for part in matched], np.int64),
        truth_areas=_concatenate([part.truth_areas for part in matched], np.float64),
        difficult=_concatenate([part.difficult for part in matched], np.bool_),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _ImageMatches:
    """The matches of one image; ground-truth boxes are numbered within it."""

    truth_labels: I64
    truth_areas: F64
    difficult: Bools
    iou: F64
    match: I64
    other_iou: F64
    other_match: I64
    in_crowd: Bools


def _match_image(image: ImageDetections) -> _ImageMatches:
    objects, crowds = image.truth.select(~image.truth.is_crowd), image.truth.select(image.truth.is_crowd)
    intersection = _intersections(image.boxes_xyxy, objects.boxes_xyxy.astype(np.float64))
    areas, object_areas = _areas(image.boxes_xyxy), _areas(objects.boxes_xyxy.astype(np.float64))
    union = areas[:, None] + object_areas[None, :] - intersection
    iou = np.divide(intersection, union, out=np.zeros_like(intersection), where=union > 0)
    is_same_class = image.labels[:, None] == objects.labels[None, :]
    best_iou, match = _best(np.where(is_same_class, iou, 0.0))
    other_iou, other_match = _best(np.where(is_same_class, 0.0, iou))
    in_crowds = _intersections(image.boxes_xyxy, crowds.boxes_xyxy.astype(np.float64))
    in_crowds = np.where(image.labels[:, None] == crowds.labels[None, :], in_crowds, 0.0)
    in_crowd: Bools = np.any(in_crowds >= CROWD_OVERLAP * np.maximum(areas, 1e-12)[:, None], axis=1)
    return _ImageMatches(
        objects.labels,
        objects.area.astype(np.float64),
        objects.difficult,
        best_iou,
        match,
        other_iou,
        other_match,
        in_crowd,
    )


def _best(iou: F64) -> tuple[F64, I64]:
    """The maximum of each row and its column; NO_MATCH where the row is zero."""
    if iou.shape[1] == 0:
        return np.zeros(len(iou)), np.full(len(iou), NO_MATCH, np.int64)
    column = iou.argmax(axis=1)
    value = iou[np.arange(len(iou)), column]
    return value, np.where(value > 0, column, NO_MATCH).astype(np.int64)


def _intersections(a_xyxy: F64, b_xyxy: F64) -> F64:
    top_left = np.maximum(a_xyxy[:, None, :2], b_xyxy[None, :, :2])
    bottom_right = np.minimum(a_xyxy[:, None, 2:], b_xyxy[None, :, 2:])
    size = np.maximum(bottom_right - top_left, 0.0)
    area: F64 = size[..., 0] * size[..., 1]
    return area


def _areas(boxes_xyxy: F64) -> F64:
    size = np.maximum(boxes_xyxy[:, 2:] - boxes_xyxy[:, :2], 0.0)
    area: F64 = size[:, 0] * size[:, 1]
    return area


def _concatenate(arrays: Sequence[npt.NDArray[Any]], dtype: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
