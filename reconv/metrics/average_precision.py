"""The detections of a model as arrays, and their average precision."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from reconv.detection.annotation import Annotation
from reconv.detection.postprocess import Detections
from reconv.metrics.detection import evaluate_detections
from reconv.metrics.detection_matches import ImageDetections

Array = npt.NDArray[Any]


def detection_outputs(found: Detections, size: int) -> dict[str, Tensor]:
    """Boxes [n, k, 4] in pixels of the network's input, scores [n, k], labels [n, k] and counts [n]."""
    boxes, labels = found.boxes_xyxy * size, (found.labels - 1).clamp(min=0)
    return {"boxes": boxes, "scores": found.scores, "labels": labels, "counts": found.counts}


def average_precision(
    truths: Mapping[int, Annotation], outputs: Mapping[str, Array], size: int, class_names: Sequence[str], metric: str
) -> float:
    """A metric of the detections of the rows whose boxes are known."""
    found = [_image_detections(outputs, row, truth, size) for row, truth in truths.items()]
    return float(evaluate_detections(found, class_names).metrics[metric])


def boxes_of(detections: Mapping[str, Array], row: int) -> tuple[Array, Array, Array]:
    """The boxes [k, 4] in pixels of the network's input, scores [k] and labels [k] of an image."""
    count = int(detections["counts"][row])
    return (
        detections["boxes"][row, :count].astype(np.float64),
        detections["scores"][row, :count].astype(np.float64),
        detections["labels"][row, :count].astype(np.int64),
    )


def _image_detections(detections: Mapping[str, Array], row: int, truth: Annotation, size: int) -> ImageDetections:
    boxes, scores, labels = boxes_of(detections, row)
    scale = np.array([truth.width, truth.height, truth.width, truth.height], np.float64) / size
    return ImageDetections(row, truth, boxes * scale, scores, labels)
