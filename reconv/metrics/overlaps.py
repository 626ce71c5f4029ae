"""Every detection with what it overlaps: the one table that VOC scores, curves and kinds of errors are read from.

Owns the pairing of found and true boxes. Refuses to know networks, metrics and files. Invariant: detections lie best
score first, equal ones in the order of images; a true box is claimed by the best detection that overlaps it most.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.data.boxes.annotations import Annotation

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]

NONE = -1
IN_CROWD = 0.5  # of a detection that lies in a crowd of its class: then it is neither right nor wrong


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One image: what is in it, and what was found, in pixels of the original image."""

    index: int  # in the validation set
    truth: Annotation
    boxes_xyxy: F64  # [k, 4], best score first
    scores: F64  # [k]
    labels: I64  # [k], from 0, as in the truth


@dataclass(frozen=True, slots=True, eq=False)
class Overlaps:
    """D detections and G true boxes of many images as flat arrays; crowds are no true boxes."""

    images: I64  # [D] places in the sequence of images
    labels: I64  # [D]
    scores: F64  # [D]
    same_iou: F64  # [D] with the true box of the own class that is overlapped most; 0: none
    same: I64  # [D] which true box that is, or NONE
    other_iou: F64  # [D] the same with boxes of other classes
    other: I64  # [D]
    in_crowd: Flags  # [D]
    truth_images: I64  # [G]
    truth_labels: I64  # [G]
    truth_areas: F64  # [G]
    difficult: Flags  # [G]

    def verdicts(self, threshold: float) -> Verdicts:
        """What each detection is worth when an overlap from `threshold` on counts as found."""
        hits = self.same_iou >= threshold
        claims = np.zeros(len(hits), bool)
        if hits.any():
            rows = np.flatnonzero(hits)
            _, first = np.unique(self.same[rows], return_index=True)
            claims[rows[first]] = True
        easy = np.zeros(len(hits), bool)
        easy[hits] = ~self.difficult[self.same[hits]]
        ignored = (hits & ~easy) | (~hits & self.in_crowd)
        return Verdicts(right=claims & easy, duplicate=hits & easy & ~claims, ignored=ignored)


@dataclass(frozen=True, slots=True, eq=False)
class Verdicts:
    """For each detection: whether it is right, found something a second time, or does not count; wrong otherwise."""

    right: Flags
    duplicate: Flags
    ignored: Flags


def overlaps_of(images: Sequence[Scored]) -> Overlaps:
    """The table of some images."""
    pieces = [_of_image(image) for image in images]
    num_true = np.cumsum([0, *(len(piece.labels) for piece in pieces)])
    counts = [len(image.scores) for image in images]
    places = np.repeat(np.arange(len(images)), counts)
    scores = _joined([image.scores for image in images], np.float64)
    order = np.argsort(-scores, kind="stable")
    offsets = np.repeat(num_true[:-1], counts)
    same = _joined([piece.same for piece in pieces], np.int64)
    other = _joined([piece.other for piece in pieces], np.int64)
    true_counts = [len(piece.labels) for piece in pieces]
    return Overlaps(
        images=places[order],
        labels=_joined([image.labels for image in images], np.int64)[order],
        scores=scores[order],
        same_iou=_joined([piece.same_iou for piece in pieces], np.float64)[order],
        same=np.where(same == NONE, NONE, same + offsets)[order],
        other_iou=_joined([piece.other_iou for piece in pieces], np.float64)[order],
        other=np.where(other == NONE, NONE, other + offsets)[order],
        in_crowd=_joined([piece.in_crowd for piece in pieces], np.bool_)[order],
        truth_images=np.repeat(np.arange(len(images)), true_counts),
        truth_labels=_joined([piece.labels for piece in pieces], np.int64),
        truth_areas=_joined([piece.areas for piece in pieces], np.float64),
        difficult=_joined([piece.difficult for piece in pieces], np.bool_),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Piece:
    """The overlaps of one image; true boxes are numbered within it."""

    labels: I64
    areas: F64
    difficult: Flags
    same_iou: F64
    same: I64
    other_iou: F64
    other: I64
    in_crowd: Flags


def _of_image(image: Scored) -> _Piece:
    objects, crowds = image.truth.take(~image.truth.is_crowd), image.truth.take(image.truth.is_crowd)
    shared = _intersections(image.boxes_xyxy, objects.boxes_xyxy.astype(np.float64))
    found, true = _areas(image.boxes_xyxy), _areas(objects.boxes_xyxy.astype(np.float64))
    union = found[:, None] + true[None, :] - shared
    iou = np.divide(shared, union, out=np.zeros_like(shared), where=union > 0)
    is_same = image.labels[:, None] == objects.labels[None, :]
    same_iou, same = _best(np.where(is_same, iou, 0.0))
    other_iou, other = _best(np.where(is_same, 0.0, iou))
    covered = _intersections(image.boxes_xyxy, crowds.boxes_xyxy.astype(np.float64))
    covered = np.where(image.labels[:, None] == crowds.labels[None, :], covered, 0.0)
    in_crowd: Flags = np.any(covered >= IN_CROWD * np.maximum(found, 1e-12)[:, None], axis=1)
    areas = objects.area.astype(np.float64)
    return _Piece(objects.labels, areas, objects.difficult, same_iou, same, other_iou, other, in_crowd)


def _best(iou: F64) -> tuple[F64, I64]:
    """The greatest of each row and its column; NONE where nothing overlaps."""
    if iou.shape[1] == 0:
        return np.zeros(len(iou)), np.full(len(iou), NONE, np.int64)
    column = iou.argmax(axis=1)
    value = iou[np.arange(len(iou)), column]
    return value, np.where(value > 0, column, NONE).astype(np.int64)


def _intersections(first: F64, second: F64) -> F64:
    corner = np.maximum(first[:, None, :2], second[None, :, :2])
    far = np.minimum(first[:, None, 2:], second[None, :, 2:])
    sides = np.maximum(far - corner, 0.0)
    product: F64 = sides[..., 0] * sides[..., 1]
    return product


def _areas(boxes_xyxy: F64) -> F64:
    sides = np.maximum(boxes_xyxy[:, 2:] - boxes_xyxy[:, :2], 0.0)
    product: F64 = sides[:, 0] * sides[:, 1]
    return product


def _joined(arrays: Sequence[npt.NDArray[Any]], dtype: type[Any]) -> npt.NDArray[Any]:
    return np.concatenate([np.zeros(0, dtype), *arrays]).astype(dtype)
