"""The gate of an exported detector: its boxes, one by one, and its average precision, beside the trained model's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.exporters.gate.check import USE_DATA, GateResult, Reference, compare_pixels
from reconv.exporters.gate.images import GateImage
from reconv.metrics.average_precision import average_precision, boxes_of

SCORE_BOUND = 1e-4
BOX_BOUND = 1e-4  # of a corner, in sides of the network's input
BOXES_PER_TIE = 1000  # one box of so many (and one more) may differ: scores or overlaps close to a threshold
MAP_BOUND = 0.001  # mAP within 0.1 points

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class BoxRules:
    """Rules that judge an exported detector."""

    size: int  # of the network's input
    class_names: Sequence[str]
    metric: str  # ap, voc10, ...
    precision: str
    max_drop: float  # of the metric, in int8


@dataclass(frozen=True, slots=True)
class BoxDifferences:
    """The boxes of two sets of detections, matched one to one within each image and class."""

    num_boxes: int
    num_unmatched: Array  # [n] boxes of an image, of either set, without a partner
    score: float  # the largest difference of matched boxes
    corner: float  # in pixels of the network's input


def compare_boxes(ours: Mapping[str, Array], theirs: Mapping[str, Array], size: int) -> BoxDifferences:
    """Match boxes of equal class whose scores and corners are within the bounds, best score first."""
    unmatched, scores, corners = np.zeros(len(ours["counts"]), np.int64), [0.0], [0.0]
    for row in range(len(unmatched)):
        expected, found = boxes_of(ours, row), boxes_of(theirs, row)
        is_free = np.ones(len(found[1]), bool)
        for box, score, label in zip(*expected, strict=True):
            corner, difference = np.abs(found[0] - box).max(axis=1, initial=0), np.abs(found[1] - score)
            fits = is_free & (found[2] == label) & (corner <= BOX_BOUND * size) & (difference <= SCORE_BOUND)
            if not fits.any():
                unmatched[row] += 1
                continue
            partner = int(np.argmin(np.where(fits, difference, np.inf)))
            is_free[partner] = False
            scores.append(float(difference[partner]))
            corners.append(float(corner[partner]))
        unmatched[row] += is_free.sum()
    return BoxDifferences(int(ours["counts"].sum()), unmatched, max(scores), max(corners))


def compare_detections(
    reference: Reference, found: Mapping[str, Array], rules: BoxRules, num_probes: int
) -> GateResult:
    """Compare the detections of run.py with the model's own: pixels, boxes one by one, average precision."""
    failures, images, is_exact = (
        compare_pixels(reference, found["pixels_crc32"]),
        reference.images,
        rules.precision == "fp32",
    )
    facts = reference.facts(rules.precision, num_probes)
    if failures and len(found["pixels_crc32"]) != len(images):
        return GateResult(tuple(failures), facts)
    if is_exact:
        boxes = compare_boxes(reference.outputs, found, rules.size)
        facts["boxes"] = {
            "num_boxes": boxes.num_boxes,
            "num_different": int(boxes.num_unmatched.sum()),
            "num_ties_allowed": 1 + boxes.num_boxes // BOXES_PER_TIE,
            "score_difference": boxes.score,
            "corner_difference_px": boxes.corner,
        }
        failures += _check_boxes(images, boxes)
    values = [_average_precision(images, outputs, rules) for outputs in (reference.outputs, found)]
    if values[0] is None or values[1] is None:
        if not is_exact:
            failures.append(f"{rules.precision} is judged by mAP, and these images have no known boxes: {USE_DATA}")
        return GateResult(tuple(failures), facts)
    ours, theirs = values[0], values[1]
    facts["average_precision"] = {"metric": rules.metric, "model": ours, "exported": theirs, "drop": ours - theirs}
    drop, bound = (abs(ours - theirs), MAP_BOUND) if is_exact else (ours - theirs, rules.max_drop)
    if drop > bound + 1e-9:
        failures.append(
            f"{rules.metric} is {theirs:.2%} instead of {ours:.2%}: {100 * drop:.2f} points of difference, more than "
            f"{100 * bound:g}" + " (--max-drop)" * (not is_exact)
        )
    return GateResult(tuple(failures), facts)


def _check_boxes(images: Sequence[GateImage], found: BoxDifferences) -> list[str]:
    """Check that the exported model does not give other boxes than the trained one, except for a few ties."""
    allowed, num_other = 1 + found.num_boxes // BOXES_PER_TIE, int(found.num_unmatched.sum())
    if num_other <= allowed:
        return []
    worst = np.argsort(-found.num_unmatched, kind="stable")[:5]
    names = ", ".join(images[row].name for row in worst if found.num_unmatched[row])
    return [f"{num_other:,} boxes differ, of {found.num_boxes:,}; {allowed:,} may be ties: {names}"]


def _average_precision(images: Sequence[GateImage], outputs: Mapping[str, Array], rules: BoxRules) -> float | None:
    """The metric of the recipe; None if no image has known boxes."""
    truths = {row: image.annotation for row, image in enumerate(images) if image.annotation is not None}
    return average_precision(truths, outputs, rules.size, rules.class_names, rules.metric) if truths else None
