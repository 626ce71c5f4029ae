"""What went wrong with detections, counted by kind, and how much was found of small, medium and large objects.

Owns the kinds and their definitions. Refuses to know networks and pages. Invariant: of every class as many of its best
detections are looked at as it has objects, so no threshold decides; each is of exactly one kind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from reconv.metrics.overlaps import Flags, Overlaps
from reconv.metrics.voc_eval import THRESHOLD

TOUCHING = 0.1  # an overlap below this is chance
SIZES_PX = (("small", 0.0, 32.0**2), ("medium", 32.0**2, 96.0**2), ("large", 96.0**2, np.inf))  # areas, as COCO's

# In the order in which a detection is asked; the last is said of objects.
KINDS = {
    "right": "overlaps an object of its class by 0.5 or more, and is the best that does",
    "duplicate": "overlaps an object of its class by 0.5 or more that a better detection has found already",
    "confusion": "overlaps an object of another class by 0.5 or more",
    "localisation": "overlaps an object of its class by less than 0.5, but by 0.1 or more",
    "background": "is none of these: there is nothing of the kind",
    "missed": "an object that no detection looked at found, took for another class or placed badly",
}


@dataclass(frozen=True, slots=True)
class SizeBucket:
    """The objects of one size, and how many of them some detection found."""

    name: str
    num_objects: int
    num_found: int


def error_kinds(overlaps: Overlaps, num_classes: int) -> dict[str, int]:
    """How many of the best detections are of each kind, and how many objects were missed."""
    verdicts = overlaps.verdicts(THRESHOLD)
    looked = _looked_at(overlaps, ~verdicts.ignored, num_classes)
    confused = ~verdicts.right & ~verdicts.duplicate & (overlaps.other_iou >= THRESHOLD)
    displaced = ~verdicts.right & ~verdicts.duplicate & ~confused & (overlaps.same_iou >= TOUCHING)
    background = ~(verdicts.right | verdicts.duplicate | confused | displaced)
    kinds = {
        "right": verdicts.right,
        "duplicate": verdicts.duplicate,
        "confusion": confused,
        "localisation": displaced,
        "background": background,
    }
    touched = np.zeros(len(overlaps.truth_labels), bool)
    touched[overlaps.same[looked & (verdicts.right | displaced)]] = True
    touched[overlaps.other[looked & confused]] = True
    missed = int((~touched & ~overlaps.difficult).sum())
    return {**{name: int((looked & flags).sum()) for name, flags in kinds.items()}, "missed": missed}


def size_buckets(overlaps: Overlaps) -> list[SizeBucket]:
    """The objects that must be found by their area in pixels of the original image."""
    verdicts = overlaps.verdicts(THRESHOLD)
    found = np.zeros(len(overlaps.truth_labels), bool)
    found[overlaps.same[verdicts.right]] = True
    buckets = []
    for name, low, high in SIZES_PX:
        inside = ~overlaps.difficult & (overlaps.truth_areas >= low) & (overlaps.truth_areas < high)
        buckets.append(SizeBucket(name, int(inside.sum()), int((inside & found).sum())))
    return buckets


def _looked_at(overlaps: Overlaps, counted: Flags, num_classes: int) -> Flags:
    """The best detections of each class, as many as it has objects."""
    num_objects = np.bincount(overlaps.truth_labels[~overlaps.difficult], minlength=num_classes)
    looked = np.zeros(len(overlaps.labels), bool)
    for label in range(num_classes):
        rows = np.flatnonzero(counted & (overlaps.labels == label))
        looked[rows[: int(num_objects[label])]] = True
    return looked
