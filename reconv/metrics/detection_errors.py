"""Counts of the kinds of errors a detector makes, and its recall for small, medium and large objects.

Of each class, as many of its best-scored detections are examined as it has objects, so no score threshold is needed.
Each examined detection is of exactly one kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reconv.metrics.detection_matches import Bools, DetectionMatches
from reconv.metrics.voc_eval import IOU_THRESHOLD

MIN_IOU = 0.1  # a lower IoU is taken for chance
AREAS_PX = (("small", 0.0, 32.0**2), ("medium", 32.0**2, 96.0**2), ("large", 96.0**2, np.inf))  # as in COCO

# Kinds of detections, in order of precedence; the last is a kind of object.
ERROR_KINDS = {
    "correct": "IoU of at least 0.5 with an object of its class, and the best-scored detection of it",
    "duplicate": "IoU of at least 0.5 with an object of its class that a better-scored detection found",
    "confusion": "IoU of at least 0.5 with an object of another class",
    "localization": "IoU of at least 0.1 but less than 0.5 with an object of its class",
    "background": "none of these: there is no such object",
    "missed": "an object that no examined detection found, confused or localized",
}


@dataclass(frozen=True, slots=True)
class SizeRecall:
    """The number of objects of one size, and how many of them were found."""

    name: str
    num_objects: int
    num_found: int


def count_error_kinds(matches: DetectionMatches, num_classes: int) -> dict[str, int]:
    """The number of examined detections of each kind, and of missed objects."""
    outcomes = matches.outcomes(IOU_THRESHOLD)
    examined = _examined(matches, ~outcomes.ignored, num_classes)
    is_hit = outcomes.true_positive | outcomes.duplicate
    confusion = ~is_hit & (matches.other_iou >= IOU_THRESHOLD)
    localization = ~is_hit & ~confusion & (matches.iou >= MIN_IOU)
    masks = {
        "correct": outcomes.true_positive,
        "duplicate": outcomes.duplicate,
        "confusion": confusion,
        "localization": localization,
        "background": ~(is_hit | confusion | localization),
    }
    touched = np.zeros(len(matches.truth_labels), bool)
    touched[matches.match[examined & (outcomes.true_positive | localization)]] = True
    touched[matches.other_match[examined & confusion]] = True
    missed = int((~touched & ~matches.difficult).sum())
    return {**{name: int((examined & mask).sum()) for name, mask in masks.items()}, "missed": missed}


def recall_by_size(matches: DetectionMatches) -> list[SizeRecall]:
    """Objects by their area in pixels of the original image, difficult ones excluded."""
    outcomes = matches.outcomes(IOU_THRESHOLD)
    found = np.zeros(len(matches.truth_labels), bool)
    found[matches.match[outcomes.true_positive]] = True
    sizes = []
    for name, low, high in AREAS_PX:
        inside = ~matches.difficult & (matches.truth_areas >= low) & (matches.truth_areas < high)
        sizes.append(SizeRecall(name, int(inside.sum()), int((inside & found).sum())))
    return sizes


def _examined(matches: DetectionMatches, counted: Bools, num_classes: int) -> Bools:
    """The best-scored detections of each class, as many as it has objects."""
    num_objects = np.bincount(matches.truth_labels[~matches.difficult], minlength=num_classes)
    examined = np.zeros(len(matches.labels), bool)
    for label in range(num_classes):
        rows = np.flatnonzero(counted & (matches.labels == label))
        examined[rows[: int(num_objects[label])]] = True
    return examined
