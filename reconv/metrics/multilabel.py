"""Mean average precision, F1 and loss of a multi-label classifier on a validation set, and its worst mistakes.

All scores are kept and sorted by sample, so the result does not depend on how the set was split over batches and ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.metrics.confusion import macro_means, scores_from_counts
from reconv.metrics.state import MetricsState
from reconv.recipe.parts.metrics import METRIC_NAMES

F64 = npt.NDArray[np.float64]
Bool = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True)
class MultilabelMistake:
    """A validation image with wrong or missing labels."""

    index: int
    labels: tuple[int, ...]
    predicted: tuple[int, ...]
    loss: float


@dataclass(frozen=True, slots=True)
class MultilabelScores:
    """The logits and labels of n samples."""

    indices: npt.NDArray[np.int64]  # [n]
    logits: F64  # [n, classes]
    present: Bool  # [n, classes]


class MultilabelMetrics:
    """Collects logits and targets on the device; `compute` reads them once."""

    def __init__(self, num_classes: int) -> None:
        self._num_classes = num_classes
        self._parts: list[tuple[Tensor, Tensor, Tensor]] = []  # indices, logits and targets of each batch
        self._merged: MultilabelScores | None = None

    @property
    def num_samples(self) -> int:
        return sum(len(indices) for indices, _, _ in self._parts) if self._merged is None else len(self._merged.indices)

    def update(self, outputs: Any, batch: Batch) -> None:
        """Add logits [n, classes] for a batch with multi-hot `targets` and `indices`."""
        logits: Tensor = outputs if outputs.dtype == torch.float64 else outputs.float()
        self._parts.append((batch["indices"], logits.detach().clone(), batch["targets"] > 0))

    def state(self) -> MetricsState:
        scores = self._scores()
        return {"indices": scores.indices, "logits": scores.logits, "present": scores.present}

    def merge(self, states: Sequence[MetricsState]) -> None:
        """Replace what was accumulated by these states, which include its own."""
        indices, logits, present = (
            np.concatenate([state[name] for state in states]) for name in ("indices", "logits", "present")
        )
        order = np.argsort(indices, kind="stable")
        self._merged = MultilabelScores(indices[order], logits[order], present[order])

    def _scores(self) -> MultilabelScores:
        if self._merged is not None:
            return self._merged
        if not self._parts:
            empty = np.zeros((0, self._num_classes))
            return MultilabelScores(np.zeros(0, np.int64), empty, empty > 0)
        indices, logits, present = (torch.cat(column).cpu() for column in zip(*self._parts, strict=True))
        return MultilabelScores(indices.numpy().astype(np.int64), logits.double().numpy(), present.numpy())

    def compute(self) -> dict[str, float]:
        """`map` and `macro_f1` are means over the classes that occur; F1 is at a score of 0.5."""
        self.merge([self.state()])
        scores = self._scores()
        if len(scores.indices) == 0:
            return dict.fromkeys(METRIC_NAMES["multilabel"], 0.0)
        predicted, occurs = scores.logits > 0, scores.present.any(axis=0)
        right = (predicted & scores.present).sum(axis=0)
        too_many, missed = (predicted & ~scores.present).sum(axis=0), (~predicted & scores.present).sum(axis=0)
        precisions = [average_precision(scores.logits[:, c], scores.present[:, c]) for c in np.flatnonzero(occurs)]
        by_class = [f1(right[c], too_many[c], missed[c]) for c in np.flatnonzero(occurs)]
        return {
            "map": _mean(precisions),
            "micro_f1": f1(right.sum(), too_many.sum(), missed.sum()),
            "macro_f1": _mean(by_class),
            "loss": float(_losses(scores).mean()),
        }

    def analysis(self, class_names: Sequence[str]) -> dict[str, Any]:
        """The scores of classes as plain data, for the report and `eval`; several labels have no confusion matrix."""
        scores = self._scores()
        predicted = scores.logits > 0
        counts = (found.sum(axis=0) for found in (scores.present, predicted, predicted & scores.present))
        by_class = scores_from_counts(*counts)
        columns = zip(scores.logits.T, scores.present.T, strict=True)
        precisions = [average_precision(*column) if column[1].any() else None for column in columns]
        return {
            "num_images": len(scores.indices),
            "metrics": {f"macro_{name}": value for name, value in macro_means(by_class).items()},
            "classes": [
                {"name": name, **asdict(score), "ap": ap}
                for name, score, ap in zip(class_names, by_class, precisions, strict=True)
            ],
        }

    def mistakes(self, count: int) -> list[MultilabelMistake]:
        """The images with the highest loss among those with a wrong or missing label, worst first."""
        scores = self._scores()
        predicted, losses = scores.logits > 0, _losses(scores)
        wrong = np.flatnonzero((predicted != scores.present).any(axis=1))
        worst = wrong[np.argsort(-losses[wrong], kind="stable")][:count]
        return [
            MultilabelMistake(
                int(scores.indices[row]),
                tuple(np.flatnonzero(scores.present[row]).tolist()),
                tuple(np.flatnonzero(predicted[row]).tolist()),
                float(losses[row]),
            )
            for row in worst
        ]


def average_precision(scores: F64, present: Bool) -> float:
    """The sum over thresholds of precision x gain in recall, as in scikit-learn; equal scores are one threshold."""
    order = np.argsort(-scores, kind="stable")
    sorted_scores = scores[order]
    ends = np.append(np.flatnonzero(np.diff(sorted_scores)), len(scores) - 1)
    found = np.cumsum(present[order])[ends]
    gains = np.diff(found, prepend=0) / max(1, int(found[-1]))
    return float((gains * found / (ends + 1)).sum())


def f1(true_positives: float, false_positives: float, false_negatives: float) -> float:
    """2 TP / (2 TP + FP + FN); 0 where there is nothing to find and nothing found."""
    total = 2 * true_positives + false_positives + false_negatives
    return float(2 * true_positives / total) if total else 0.0


def _losses(scores: MultilabelScores) -> F64:
    """The binary cross-entropy of each sample, averaged over classes."""
    losses: F64 = (np.logaddexp(0, scores.logits) - scores.logits * scores.present).mean(axis=1)
    return losses


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
