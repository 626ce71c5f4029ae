"""Pascal VOC average precision at IoU 0.5: of 2007 (11 recalls) and since 2010 (area under the curve).

Difficult objects need not be found. A class without objects has no average precision and is excluded from the mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reconv.metrics.detection_matches import DetectionMatches

F64 = npt.NDArray[np.float64]

IOU_THRESHOLD = 0.5
CURVE_RECALLS = np.linspace(0, 1, 101)
SCORE_THRESHOLDS = np.linspace(0, 1, 101)


@dataclass(frozen=True, slots=True, eq=False)
class PrecisionRecall:
    """The precision-recall curve of one class, with a point for each detection that is not ignored."""

    label: int
    num_objects: int  # difficult ones excluded
    num_detections: int
    recall: F64  # rising
    precision: F64
    scores: F64  # falling

    @property
    def voc10(self) -> float:
        """The area under the interpolated curve."""
        recall = np.concatenate([[0.0], self.recall, [1.0]])
        envelope = np.maximum.accumulate(np.concatenate([self.precision, [0.0]])[::-1])[::-1]
        return float(np.sum(np.diff(recall)[: len(envelope)] * envelope))

    @property
    def voc07(self) -> float:
        """The mean interpolated precision at the recalls 0, 0.1, ... 1."""
        return float(np.mean(self.interpolated(np.linspace(0, 1, 11))))

    def interpolated(self, recalls: F64) -> F64:
        """The best precision at or above each recall; 0 where that recall is not reached."""
        envelope = np.concatenate([np.maximum.accumulate(self.precision[::-1])[::-1], [0.0]])
        # A recall of 3/10 must be found at 0.3, whichever of the two is larger in binary.
        best: F64 = envelope[np.searchsorted(self.recall, recalls - 1e-12)]
        return best


def precision_recall_by_class(
    matches: DetectionMatches, num_classes: int, iou_threshold: float = IOU_THRESHOLD
) -> list[PrecisionRecall]:
    """The precision-recall curve of every class, including those without objects."""
    outcomes = matches.outcomes(iou_threshold)
    num_objects = np.bincount(matches.truth_labels[~matches.difficult], minlength=num_classes)
    curves = []
    for label in range(num_classes):
        counted = ~outcomes.ignored & (matches.labels == label)
        true_positives = np.cumsum(outcomes.true_positive[counted])
        recall = true_positives / max(1, int(num_objects[label]))
        precision = true_positives / np.arange(1, len(true_positives) + 1)
        num_label = int(num_objects[label])
        curves.append(
            PrecisionRecall(label, num_label, len(true_positives), recall, precision, matches.scores[counted])
        )
    return curves


@dataclass(frozen=True, slots=True, eq=False)
class F1Curve:
    """Precision, recall and F1 of the detections with at least a score, as means over the classes with objects."""

    scores: F64  # [thresholds], rising
    precision: F64
    recall: F64
    f1: F64

    @property
    def best(self) -> int:
        """The threshold with the highest F1; the lowest of several."""
        return int(self.f1.argmax())


def f1_curve(curves: Sequence[PrecisionRecall], thresholds: F64 = SCORE_THRESHOLDS) -> F1Curve:
    """The F1 curve of all classes together; zeros if no class has objects. A class without detections has 0."""
    columns = [_at_thresholds(curve, thresholds) for curve in curves if curve.num_objects]
    means = np.mean(columns, axis=0) if columns else np.zeros((3, len(thresholds)))
    return F1Curve(thresholds, *means)


def _at_thresholds(curve: PrecisionRecall, thresholds: F64) -> F64:
    """Precision, recall and F1 [3, thresholds] of the detections of a class with at least each score."""
    num_kept = np.searchsorted(-curve.scores, -thresholds, side="right")
    precision = np.concatenate([[0.0], curve.precision])[num_kept]
    recall = np.concatenate([[0.0], curve.recall])[num_kept]
    f1 = 2 * precision * recall / np.maximum(precision + recall, 1e-12)
    return np.stack([precision, recall, f1])


def voc_metrics(curves: list[PrecisionRecall]) -> dict[str, float]:
    """Both mean average precisions over the classes that have objects; 0 if none has."""
    with_objects = [curve for curve in curves if curve.num_objects]
    if not with_objects:
        return {"voc07": 0.0, "voc10": 0.0}
    return {
        "voc07": float(np.mean([curve.voc07 for curve in with_objects])),
        "voc10": float(np.mean([curve.voc10 for curve in with_objects])),
    }
