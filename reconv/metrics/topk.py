"""Top-1 and top-5 accuracy and the mean loss of a classifier on a validation set, and its worst mistakes.

Counts are integers and the loss is summed in fp64 in sample order, so the result does not depend on how the set was
split into batches over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.batch import Batch
from reconv.precision.accumulate import to_accumulate_dtype

NUM_MISTAKES = 16


@dataclass(frozen=True, slots=True)
class Mistake:
    """A misclassified validation image."""

    index: int
    target: int
    predicted: int
    confidence: float
    loss: float


@dataclass(frozen=True, slots=True)
class ClassificationState:
    """The accumulated sums of one rank, to be merged with those of others."""

    num_samples: int
    correct1: int
    correct5: int
    losses: list[list[float]]  # of each batch: its first position and its loss sum
    worst: list[list[float]]


class ClassificationMetrics:
    """Accumulates loss, top-1 and top-5 accuracy on the device; `compute` reads the sums once."""

    def __init__(self, num_classes: int) -> None:
        self.num_samples = 0
        self._k = min(5, num_classes)
        self._correct1: Tensor | int = 0
        self._correct5: Tensor | int = 0
        self._losses: list[Tensor] = []  # of each batch, in fp64: its first position and its loss sum
        self._worst: Tensor | None = None  # [n, 5] fp64: loss, index, target, predicted, confidence

    def update(self, outputs: Any, batch: Batch) -> None:
        """Add logits [n, classes] for a batch with `targets` and `indices`."""
        logits: Tensor = outputs if outputs.dtype == torch.float64 else outputs.float()
        targets = batch["targets"]
        losses = to_accumulate_dtype(F.cross_entropy(logits, targets, reduction="none"))
        topk = logits.topk(self._k, dim=1).indices
        correct = topk[:, 0] == targets
        self.num_samples += len(batch)
        self._correct1 = self._correct1 + correct.sum()
        self._correct5 = self._correct5 + (topk == targets[:, None]).any(dim=1).sum()
        self._losses.append(torch.stack([to_accumulate_dtype(batch.positions[0]), losses.sum()]))
        confidence = to_accumulate_dtype(logits.softmax(dim=1).amax(dim=1))
        columns = [
            losses.masked_fill(correct, -1.0),
            to_accumulate_dtype(batch["indices"]),
            to_accumulate_dtype(targets),
            to_accumulate_dtype(topk[:, 0]),
            confidence,
        ]
        rows = torch.stack(columns, dim=1)
        self._worst = _worst(rows if self._worst is None else torch.cat([self._worst, rows]))

    def compute(self) -> dict[str, float]:
        if self.num_samples == 0:
            return {"top1": 0.0, "top5": 0.0, "loss": 0.0}
        n = self.num_samples
        # Floating-point sums depend on their order, so add batches by position whichever rank had them.
        by_position = sorted(torch.stack(self._losses).tolist(), key=lambda batch: batch[0])
        loss = sum(loss for _, loss in by_position)
        return {"top1": int(self._correct1) / n, "top5": int(self._correct5) / n, "loss": loss / n}

    def state(self) -> ClassificationState:
        worst = [] if self._worst is None else self._worst.tolist()
        losses = torch.stack(self._losses).tolist() if self._losses else []
        return ClassificationState(self.num_samples, int(self._correct1), int(self._correct5), losses, worst)

    def merge(self, states: Sequence[ClassificationState]) -> None:
        """Replace what was accumulated by the states of all ranks, this one included."""
        self.num_samples = sum(state.num_samples for state in states)
        self._correct1 = sum(state.correct1 for state in states)
        self._correct5 = sum(state.correct5 for state in states)
        self._losses = [torch.tensor(batch, dtype=torch.float64) for state in states for batch in state.losses]
        worst = sorted((row for state in states for row in state.worst), key=lambda row: row[1])
        self._worst = _worst(torch.tensor(worst, dtype=torch.float64)) if worst else None

    def mistakes(self) -> list[Mistake]:
        """The misclassified images with the highest loss, worst first."""
        rows = [] if self._worst is None else self._worst.tolist()
        return [Mistake(int(i), int(t), int(p), c, loss) for loss, i, t, p, c in rows if loss >= 0]


def _worst(rows: Tensor) -> Tensor:
    """The rows with the highest loss; ties go to the earlier row."""
    order = rows[:, 0].sort(descending=True, stable=True).indices
    return rows[order[:NUM_MISTAKES]]
