"""Findings of a review: a list with a score and a proposed correction for each, which recipes take as a CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from reconv.data.corrections import EXCLUDE, RELABEL
from reconv.data.dataset import F64, I64
from reconv.detection.annotation import Annotation
from reconv.review.copies import Copy, Thumbnails
from reconv.review.images import ReviewedImages
from reconv.review.labels import LabelScores
from reconv.review.neighbors import F32, nearest_neighbors

Kind = Literal["label", "leak", "copy", "box", "outlier", "unreadable"]
KINDS: dict[Kind, str] = {
    "label": "Wrong labels",
    "leak": "In training and in validation",
    "copy": "Near duplicates",
    "box": "Boxes",
    "outlier": "Outliers",
    "unreadable": "Unreadable images",
}
AUTOMATIC: tuple[Kind, ...] = ("label", "leak", "copy", "unreadable")  # what --accept-above accepts
COLUMNS = ("path", "split", "action", "label", "kind", "score", "proposed", "given", "other", "note")
MIN_SCORE = 0.2  # of a label that is listed
NUM_NEIGHBORS = 10
OUTLIER_DEVIATIONS = 5.0  # an image this far from its neighbors scores 0.5
_MIN_DEVIATIONS = 4.0
_MIN_CLEAR = 0.5  # of the most likely class, to propose it


@dataclass(frozen=True, slots=True, eq=False)
class SuspectBox:
    """A box that is not as a detector sees it."""

    problem: str  # missing, extra, shifted or wrong class
    box_xyxy: tuple[float, float, float, float]  # as annotated; of a missing one as detected
    detected_xyxy: tuple[float, float, float, float] | None
    truth: Annotation  # all boxes of the image


@dataclass(frozen=True, slots=True)
class ReviewFinding:
    """One suspicion about an image: what is likely wrong, and the correction that follows."""

    kind: Kind
    row: int  # of the image
    score: float  # from 0 to 1
    action: str  # exclude or relabel
    label: str = ""  # the proposed class
    given: str = ""  # the class in the data
    other: int | None = None  # the image that it is a copy of
    note: str = ""
    box: SuspectBox | None = None


def label_findings(images: ReviewedImages, rows: I64, scores: LabelScores, features: F32 | None) -> list[ReviewFinding]:
    """Labels that are likely wrong, of the images `rows` that were judged."""
    names, found = images.class_names, []
    chosen = np.flatnonzero((scores.wrong >= MIN_SCORE) & (scores.best != images.labels[rows]))
    neighbors = _neighbor_labels(images, rows, features)
    for at in chosen.tolist():
        row, best = int(rows[at]), float(scores.best_score[at])
        is_clear = best >= _MIN_CLEAR
        note = f"{names[scores.best[at]]} with {100 * best:.0f} %" + neighbors(at)
        found.append(
            ReviewFinding(
                "label",
                row,
                float(scores.wrong[at]),
                RELABEL if is_clear else EXCLUDE,
                names[scores.best[at]] if is_clear else "",
                names[images.labels[row]],
                note=note,
            )
        )
    return _ranked(found)


class _neighbor_labels:
    """The classes of the images that look most alike, in words."""

    def __init__(self, images: ReviewedImages, rows: I64, features: F32 | None) -> None:
        self._images, self._rows = images, rows
        self._neighbors = None if features is None else nearest_neighbors(features[rows], 5)[0]

    def __call__(self, at: int) -> str:
        if self._neighbors is None or not self._neighbors.shape[1]:
            return ""
        labels = self._images.labels[self._rows[self._neighbors[at]]]
        return "; most alike: " + ", ".join(self._images.class_names[label] for label in labels.tolist())


def copy_findings(images: ReviewedImages, copies: Sequence[Copy]) -> list[ReviewFinding]:
    """Copies within a split, of which the smaller image is left out, and across splits, where training's is."""
    found = []
    for copy in copies:
        keep, drop = copy.first, copy.second
        is_leak = images.split(keep) != images.split(drop)
        if is_leak and images.split(drop) == "val":
            keep, drop = drop, keep
        given, kept = ("" if images.has_boxes else images.class_names[images.labels[row]] for row in (drop, keep))
        note = f"a copy of {images.paths[keep]} in {images.split(keep)}"
        differs = f", which is labeled {kept}" if given != kept else ""
        found.append(
            ReviewFinding(
                "leak" if is_leak else "copy", drop, copy.score, EXCLUDE, given=given, other=keep, note=note + differs
            )
        )
    return _ranked(found)


def outlier_findings(images: ReviewedImages, features: F32, is_read: np.ndarray) -> list[ReviewFinding]:
    """Images that are unlike all others: far from their neighbors in the features of a network."""
    rows = np.flatnonzero(is_read)
    _, similarities = nearest_neighbors(features[rows], NUM_NEIGHBORS)
    if not similarities.shape[1] or len(rows) <= NUM_NEIGHBORS:
        return []
    deviations = robust_deviations(1 - similarities.mean(axis=1).astype(np.float64))
    found = []
    for at in np.flatnonzero(deviations >= _MIN_DEVIATIONS).tolist():
        row, far = int(rows[at]), float(deviations[at])
        given = "" if images.has_boxes else images.class_names[images.labels[row]]
        note = f"{far:.1f} deviations farther from its neighbors than images usually are"
        score = far / (far + OUTLIER_DEVIATIONS)
        found.append(ReviewFinding("outlier", row, score, EXCLUDE, given=given, note=note))
    return _ranked(found)


def robust_deviations(values: F64) -> F64:
    """The distance of each value from the median, in standard deviations that outliers do not change [n]."""
    median = np.median(values)
    spread = 1.4826 * np.median(np.abs(values - median))
    deviations: F64 = (values - median) / max(float(spread), 1e-9)
    return deviations


def unreadable_findings(thumbnails: Thumbnails) -> list[ReviewFinding]:
    """Images that do not decode."""
    rows = np.flatnonzero(~thumbnails.is_read).tolist()
    return [ReviewFinding("unreadable", row, 1.0, EXCLUDE, note=thumbnails.errors[row]) for row in rows]


def _ranked(findings: Iterable[ReviewFinding]) -> list[ReviewFinding]:
    """The highest score first, ties in the order of the images."""
    return sorted(findings, key=lambda finding: (-finding.score, finding.row))


def accept_above(findings: Sequence[ReviewFinding], score: float) -> list[ReviewFinding]:
    """Findings to accept without a human: one per image, and none that needs eyes, as outliers and boxes do."""
    chosen: dict[int, ReviewFinding] = {}
    for finding in findings:
        if finding.kind not in AUTOMATIC or finding.score < score:
            continue
        before = chosen.get(finding.row)
        if before is None or (finding.action == EXCLUDE and before.action == RELABEL):
            chosen[finding.row] = finding
    return list(chosen.values())


def as_csv(images: ReviewedImages, findings: Sequence[ReviewFinding], accepted: Sequence[ReviewFinding] = ()) -> bytes:
    """The list as a CSV file that `data.exclude` and `data.relabel` take: they see the accepted findings alone."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    is_accepted = {id(finding) for finding in accepted}
    for finding in findings:
        row = as_row(images, finding)
        writer.writerow([row[name] if name != "action" or id(finding) in is_accepted else "" for name in COLUMNS])
    return text.getvalue().encode("utf-8", "surrogateescape")


def as_row(images: ReviewedImages, finding: ReviewFinding) -> dict[str, str]:
    """One finding in the columns of the list, as if it were accepted."""
    return {
        "path": images.paths[finding.row],
        "split": images.split(finding.row),
        "action": finding.action,
        "label": finding.label,
        "kind": finding.kind,
        "score": f"{finding.score:.4f}",
        "proposed": finding.action,
        "given": finding.given,
        "other": "" if finding.other is None else images.paths[finding.other],
        "note": finding.note,
    }
