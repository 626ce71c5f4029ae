"""Ground truth and detections for tests: the stored COCO cases, and helpers to write a few boxes by hand."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from reconv.core.batch import Batch
from reconv.detection.annotation import Annotation, make_annotation
from reconv.detection.postprocess import Detections
from reconv.metrics.detection_matches import ImageDetections

STORED = Path(__file__).parent.parent / "metrics" / "fixtures" / "coco_cases.json"
Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Case:
    """Stored images and pycocotools' metrics for them."""

    name: str
    images: list[ImageDetections]
    class_names: tuple[str, ...]
    metrics: list[float]


def stored_cases() -> list[Case]:
    return [_case(case) for case in json.loads(STORED.read_text())]


def _case(case: dict[str, Any]) -> Case:
    truth = case["truth"]
    labels = {category["id"]: label for label, category in enumerate(truth["categories"])}
    images = []
    for index, image in enumerate(truth["images"]):
        own = [a for a in truth["annotations"] if a["image_id"] == image["id"]]
        known = make_annotation(
            _xyxy([a["bbox"] for a in own]),
            [labels[a["category_id"]] for a in own],
            image["id"],
            image["height"],
            image["width"],
            is_crowd=[a["iscrowd"] for a in own],
            area=[a["area"] for a in own],
        )
        found = [f for f in case["found"] if f["image_id"] == image["id"]]
        found.sort(key=lambda f: -f["score"])
        images.append(
            ImageDetections(
                index,
                known,
                _xyxy([f["bbox"] for f in found]),
                np.array([f["score"] for f in found], np.float64),
                np.array([labels[f["category_id"]] for f in found], np.int64),
            )
        )
    return Case(case["name"], images, tuple(c["name"] for c in truth["categories"]), case["numbers"])


def _xyxy(boxes: Sequence[Sequence[float]]) -> np.ndarray:
    array = np.array(boxes, np.float64).reshape(-1, 4)
    array[:, 2:] += array[:, :2]
    return array


def true_boxes(*boxes: tuple[Box, int], difficult: Sequence[int] = (), crowds: Sequence[int] = ()) -> Annotation:
    """An annotation of an image of 100 x 100; boxes with their classes, some difficult or crowds by number."""
    numbers = range(len(boxes))
    return make_annotation(
        [box for box, _ in boxes],
        [label for _, label in boxes],
        7,
        100,
        100,
        is_crowd=[n in crowds for n in numbers],
        difficult=[n in difficult for n in numbers],
    )


def image_with(truth: Annotation, *found: tuple[Box, int, float], index: int = 0) -> ImageDetections:
    """An image with its detections: boxes, classes and scores, best first."""
    return ImageDetections(
        index,
        truth,
        np.array([box for box, _, _ in found], np.float64).reshape(-1, 4),
        np.array([score for _, _, score in found], np.float64),
        np.array([label for _, label, _ in found], np.int64),
    )


def as_detections(images: Sequence[ImageDetections], width: int = 200) -> Detections:
    """The same detections as a batch's padded tensors."""
    boxes, scores = torch.zeros(len(images), width, 4), torch.zeros(len(images), width)
    labels = torch.zeros(len(images), width, dtype=torch.int64)
    for row, image in enumerate(images):
        sides = np.array([image.truth.width, image.truth.height] * 2)
        count = len(image.scores)
        boxes[row, :count] = torch.from_numpy(image.boxes_xyxy / sides).float()
        scores[row, :count] = torch.from_numpy(image.scores).float()
        labels[row, :count] = torch.from_numpy(image.labels) + 1
    return Detections(boxes, scores, labels, torch.tensor([len(image.scores) for image in images]))


def batch_of(images: Sequence[ImageDetections]) -> Batch:
    """The batch those images came in."""
    indices = torch.tensor([image.index for image in images], dtype=torch.int64)
    return Batch({"indices": indices}, indices, (len(images),))
