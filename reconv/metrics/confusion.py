"""Confusions of a classifier: the confusion matrix, precision, recall and F1 by class, and calibration.

All of it is computed from the prediction for each image, so batches and ranks do not change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.metrics.topk import F64, I64, PredictionTable

NUM_BINS = 15  # as in Guo et al., On Calibration of Modern Neural Networks
MAX_PAIRS = 20


@dataclass(frozen=True, slots=True, eq=False)
class ConfusionMatrix:
    """The nonzero cells of a confusion matrix, by target, then predicted class."""

    num_classes: int
    target: I64  # [cells]
    predicted: I64  # [cells]
    count: I64  # [cells]

    @classmethod
    def from_predictions(cls, target: I64, predicted: I64, num_classes: int) -> ConfusionMatrix:
        cells, count = np.unique(target * num_classes + predicted, return_counts=True)
        return cls(num_classes, cells // num_classes, cells % num_classes, count.astype(np.int64))

    @property
    def num_images(self) -> I64:
        """The number of images of each class [classes]."""
        return self._sums(self.target)

    @property
    def num_predicted(self) -> I64:
        """Number of predictions of each class [classes]."""
        return self._sums(self.predicted)

    @property
    def num_correct(self) -> I64:
        """The number of correctly classified images of each class [classes]."""
        return self._sums(np.where(self.target == self.predicted, self.target, self.num_classes))

    def _sums(self, label: I64) -> I64:
        sums: I64 = np.bincount(label, self.count, self.num_classes)[: self.num_classes].astype(np.int64)
        return sums

    def most_confused(self, count: int = MAX_PAIRS) -> list[tuple[int, int, int]]:
        """Target, predicted class and number of images of the largest cells off the diagonal; ties in class order."""
        wrong = np.flatnonzero(self.target != self.predicted)
        largest = wrong[np.argsort(-self.count[wrong], kind="stable")][:count]
        return [(int(self.target[cell]), int(self.predicted[cell]), int(self.count[cell])) for cell in largest]


@dataclass(frozen=True, slots=True)
class ClassScores:
    """Precision, recall and F1 of one class; None where they are not defined."""

    num_images: int
    num_predicted: int
    precision: float | None  # None: never predicted
    recall: float | None  # None: no images
    f1: float | None  # None: neither


def class_scores(matrix: ConfusionMatrix) -> list[ClassScores]:
    """The scores of every class."""
    return scores_from_counts(matrix.num_images, matrix.num_predicted, matrix.num_correct)


def scores_from_counts(num_images: I64, num_predicted: I64, num_correct: I64) -> list[ClassScores]:
    """The scores of every class from counts [classes]: its images, its predictions, and the correct ones of them."""
    columns = (num_images.tolist(), num_predicted.tolist(), num_correct.tolist())
    return [
        ClassScores(
            images,
            predicted,
            precision=correct / predicted if predicted else None,
            recall=correct / images if images else None,
            f1=2 * correct / (images + predicted) if images + predicted else None,
        )
        for images, predicted, correct in zip(*columns, strict=True)
    ]


def macro_means(scores: Sequence[ClassScores]) -> dict[str, float]:
    """The means of precision, recall and F1 over the classes that have images; an undefined precision counts as 0."""
    with_images = [score for score in scores if score.num_images]
    if not with_images:
        return {"precision": 0.0, "recall": 0.0, "f1": 0.0}
    values = {name: [getattr(score, name) or 0.0 for score in with_images] for name in ("precision", "recall", "f1")}
    return {name: float(np.mean(column)) for name, column in values.items()}


@dataclass(frozen=True, slots=True, eq=False)
class Calibration:
    """Reliability by confidence, in bins of equal width; a bin includes its upper edge."""

    count: I64  # [bins]
    confidence: F64  # [bins] the mean; 0 for an empty bin
    accuracy: F64  # [bins] likewise

    @classmethod
    def from_predictions(
        cls, confidence: F64, is_correct: npt.NDArray[np.bool_], num_bins: int = NUM_BINS
    ) -> Calibration:
        confidence = np.nan_to_num(confidence)  # of a network that has diverged
        bins = np.clip(np.ceil(confidence * num_bins).astype(np.int64) - 1, 0, num_bins - 1)
        count = np.bincount(bins, minlength=num_bins)
        divisor = np.maximum(count, 1)
        return cls(
            count.astype(np.int64),
            np.bincount(bins, confidence, num_bins) / divisor,
            np.bincount(bins, is_correct, num_bins) / divisor,
        )

    @property
    def error(self) -> float:
        """The expected calibration error: the mean distance of accuracy and confidence, weighted by images."""
        total = max(1, int(self.count.sum()))
        return float(np.sum(self.count * np.abs(self.accuracy - self.confidence)) / total)


def analyze_predictions(predictions: PredictionTable, class_names: Sequence[str]) -> dict[str, Any]:
    """The confusion matrix, the scores of classes and the calibration as plain data, for the report and `eval`."""
    matrix = ConfusionMatrix.from_predictions(predictions.target, predictions.predicted, len(class_names))
    scores = class_scores(matrix)
    calibration = Calibration.from_predictions(predictions.confidence, predictions.is_correct)
    return {
        "num_images": len(predictions),
        "metrics": {
            "accuracy": float(predictions.is_correct.mean()) if len(predictions) else 0.0,
            **{f"macro_{name}": value for name, value in macro_means(scores).items()},
            "calibration_error": calibration.error,
        },
        "classes": [{"name": name, **asdict(score)} for name, score in zip(class_names, scores, strict=True)],
        "confusion": {
            "target": matrix.target.tolist(),
            "predicted": matrix.predicted.tolist(),
            "count": matrix.count.tolist(),
        },
        "most_confused": [
            {"target": class_names[target], "predicted": class_names[predicted], "num_images": count}
            for target, predicted, count in matrix.most_confused()
        ],
        "calibration": {
            "num_images": calibration.count.tolist(),
            "confidence": [round(value, 5) for value in calibration.confidence.tolist()],
            "accuracy": [round(value, 5) for value in calibration.accuracy.tolist()],
        },
    }
