"""Average precision as the Pascal VOC challenges count it: at an overlap of 0.5, difficult objects not demanded.

Owns both forms, that of 2007 (precision at 11 recalls) and that since 2010 (the whole area). Refuses to know boxes.
Invariant: a class without an object that must be found has no precision and is left out of every mean.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from reconv.metrics.overlaps import Overlaps

F64 = npt.NDArray[np.float64]

THRESHOLD = 0.5
CURVE_RECALLS = np.linspace(0, 1, 101)


@dataclass(frozen=True, slots=True, eq=False)
class ClassPrecision:
    """One class at one overlap: the objects that must be found, and precision over recall."""

    label: int
    num_objects: int
    num_detections: int
    recall: F64  # rising, one value for each detection that counts
    precision: F64

    @property
    def voc10(self) -> float:
        """The area under the curve, its precision made falling."""
        recall = np.concatenate([[0.0], self.recall, [1.0]])
        envelope = np.maximum.accumulate(np.concatenate([self.precision, [0.0]])[::-1])[::-1]
        return float(np.sum(np.diff(recall)[: len(envelope)] * envelope))

    @property
    def voc07(self) -> float:
        """The mean of the best precision at or above each of the recalls 0, 0.1, ... 1."""
        return float(np.mean(self.best_at(np.linspace(0, 1, 11))))

    def best_at(self, recalls: F64) -> F64:
        """The best precision at or above each recall; 0 where that recall is not reached."""
        envelope = np.concatenate([np.maximum.accumulate(self.precision[::-1])[::-1], [0.0]])
        # A recall of 3/10 is found at 0.3, whichever of the two is the larger in binary.
        best: F64 = envelope[np.searchsorted(self.recall, recalls - 1e-12)]
        return best


def class_precisions(overlaps: Overlaps, num_classes: int, threshold: float = THRESHOLD) -> list[ClassPrecision]:
    """Precision over recall of every class, those without objects too."""
    verdicts = overlaps.verdicts(threshold)
    num_objects = np.bincount(overlaps.truth_labels[~overlaps.difficult], minlength=num_classes)
    counted = ~verdicts.ignored
    results = []
    for label in range(num_classes):
        right = np.cumsum(verdicts.right[counted & (overlaps.labels == label)])
        recall = right / max(1, int(num_objects[label]))
        precision = right / np.arange(1, len(right) + 1)
        results.append(ClassPrecision(label, int(num_objects[label]), len(right), recall, precision))
    return results


def voc_numbers(precisions: list[ClassPrecision]) -> dict[str, float]:
    """The mean over the classes that have objects, in both forms; 0 where none has."""
    known = [precision for precision in precisions if precision.num_objects]
    if not known:
        return {"voc07": 0.0, "voc10": 0.0}
    return {
        "voc07": float(np.mean([precision.voc07 for precision in known])),
        "voc10": float(np.mean([precision.voc10 for precision in known])),
    }
