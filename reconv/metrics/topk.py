"""Top-1 and top-5 accuracy and the mean loss of a classifier on a validation set, and the prediction for each image.

Counts are integers and the loss is summed in fp64 in sample order, so the result does not depend on how the set was
split into batches over ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.metrics.state import MetricsState
from reconv.precision.policy import to_accumulate_dtype

F64 = npt.NDArray[np.float64]
I64 = npt.NDArray[np.int64]

TOP_K = 5  # with no more classes than that, every prediction is among the top 5, and top5 is not reported
_COLUMNS = 7


@dataclass(frozen=True, slots=True, eq=False)
class PredictionTable:
    """The predictions for n validation images, each array [n], in the order of the validation set."""

    index: I64  # in the validation set
    target: I64
    predicted: I64
    runner_up: I64  # the class with the second-highest probability; of a single class, that class
    confidence: F64  # the probability of the predicted class
    runner_up_confidence: F64
    loss: F64

    @classmethod
    def from_rows(cls, rows: F64) -> PredictionTable:
        """From rows [n, 7] with these columns, in any order."""
        rows = rows[np.argsort(rows[:, 0], kind="stable")]
        index, target, predicted, runner_up = (column.astype(np.int64) for column in rows[:, :4].T)
        return cls(index, target, predicted, runner_up, *np.ascontiguousarray(rows[:, 4:].T))

    def __len__(self) -> int:
        return len(self.index)

    @property
    def is_correct(self) -> npt.NDArray[np.bool_]:
        correct: npt.NDArray[np.bool_] = self.predicted == self.target
        return correct

    def worst(self, count: int) -> I64:
        """The rows of the wrong predictions with the highest loss, worst first; ties in the order of the set."""
        order = np.argsort(-self.loss, kind="stable")
        return order[~self.is_correct[order]][:count]

    def most_uncertain(self, count: int) -> I64:
        """The rows with the smallest margin between the two best classes, right or wrong; ties likewise."""
        return np.argsort(self.confidence - self.runner_up_confidence, kind="stable")[:count]


class ClassificationMetrics:
    """Accumulates loss, top-1 and top-5 accuracy on the device; `compute` reads the sums once."""

    def __init__(self, num_classes: int) -> None:
        self.keeps_logits = False  # of all images, for `metrics.confidence`
        self.num_samples = 0
        self.num_classes = num_classes
        self._k = min(TOP_K, num_classes)
        self._correct1: Tensor | int = 0
        self._correct5: Tensor | int = 0
        self._losses: list[Tensor] = []  # of each batch, in fp64: its first position and its loss sum
        self._rows: list[Tensor] = []  # of each batch, in fp64: the columns of PredictionTable
        self._logits: list[Tensor] = []  # of each batch, in fp32 and in the order of its rows

    def update(self, outputs: Any, batch: Batch) -> None:
        """Add logits [n, classes] for a batch with `targets` and `indices`."""
        logits: Tensor = outputs if outputs.dtype == torch.float64 else outputs.float()
        targets = batch["targets"]
        losses = to_accumulate_dtype(F.cross_entropy(logits, targets, reduction="none"))
        topk = logits.topk(self._k, dim=1).indices
        self.num_samples += len(batch)
        self._correct1 = self._correct1 + (topk[:, 0] == targets).sum()
        self._correct5 = self._correct5 + (topk == targets[:, None]).any(dim=1).sum()
        self._losses.append(torch.stack([to_accumulate_dtype(batch.positions[0]), losses.sum()]))
        best_two = topk[:, :2] if self._k > 1 else topk.expand(-1, 2)  # a list of columns would be copied to the device
        scores = logits.softmax(dim=1).gather(1, best_two)
        columns = [batch["indices"][:, None], targets[:, None], best_two, scores, losses[:, None]]
        self._rows.append(torch.cat([to_accumulate_dtype(column) for column in columns], dim=1))
        if self.keeps_logits:
            self._logits.append(logits.detach().float())

    def compute(self) -> dict[str, float]:
        n = max(1, self.num_samples)
        # Floating-point sums depend on their order, so add batches by position whichever rank had them.
        by_position = sorted(torch.stack(self._losses).tolist() if self._losses else [], key=lambda batch: batch[0])
        loss = sum((loss for _, loss in by_position), 0.0)
        top5 = {"top5": int(self._correct5) / n} if self.num_classes > TOP_K else {}
        return {"top1": int(self._correct1) / n, **top5, "loss": loss / n}

    def state(self) -> MetricsState:
        losses = torch.stack(self._losses).cpu().double().numpy() if self._losses else np.zeros((0, 2))
        counts = np.array([self.num_samples, int(self._correct1), int(self._correct5)], np.int64)
        state = {"counts": counts, "losses": losses, "rows": self._all_rows().numpy()}
        return {**state, "logits": self._all_logits().numpy()} if self.keeps_logits else state

    def merge(self, states: Sequence[MetricsState]) -> None:
        """Replace what was accumulated by these states, which include its own."""
        counts = sum((state["counts"] for state in states), np.zeros(3, np.int64))
        self.num_samples, self._correct1, self._correct5 = (int(count) for count in counts)
        self._losses = [batch for state in states for batch in torch.from_numpy(state["losses"])]
        self._rows = [torch.from_numpy(state["rows"]) for state in states]
        if self.keeps_logits:
            self._logits = [torch.from_numpy(state["logits"]) for state in states]

    def predictions(self) -> PredictionTable:
        """The prediction for each image. Synchronizes with the device."""
        return PredictionTable.from_rows(self._all_rows().numpy())

    def logits(self) -> tuple[Tensor, Tensor]:
        """The logits [n, classes] and the class indices [n] on the host, in the order of the validation set."""
        rows = self._all_rows()
        order = torch.argsort(rows[:, 0], stable=True)
        return self._all_logits()[order], rows[order, 1].long()

    def _all_logits(self) -> Tensor:
        return torch.cat(self._logits).cpu() if self._logits else torch.zeros(0, self.num_classes)

    def _all_rows(self) -> Tensor:
        return torch.cat(self._rows).cpu().double() if self._rows else torch.zeros(0, _COLUMNS, dtype=torch.float64)
