"""The interface between the trainer and a task: loss sums in training, metrics in evaluation.

`Task.weight(batch)` is known before the forward pass and `Task.loss(outputs, batch)` returns sums; the training step
divides once, by the weight of the whole global batch. So micro-batches, ranks and pipelines give the same gradients
(tests/laws/test_law_micro_batches.py, test_law_ranks.py, test_law_pipeline.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from reconv.core.batch import Batch
from reconv.metrics.state import MetricsState


@dataclass(frozen=True, slots=True)
class LossSums:
    """The loss and metrics of a micro-batch, summed over its samples (never means)."""

    loss: Tensor  # divided by the weight of the global batch and differentiated by the trainer
    metrics: Mapping[str, Tensor]  # detached sums, such as the number of correct predictions


class Metrics(Protocol):
    """Accumulates exact metrics over a validation set."""

    @property
    def num_samples(self) -> int: ...
    def update(self, outputs: Any, batch: Batch) -> None: ...
    def compute(self) -> dict[str, float]:
        """Metrics as fractions. Synchronizes with the device once."""
        ...

    def state(self) -> MetricsState:
        """Accumulated state as arrays that can be sent to other ranks and written to a file."""
        ...

    def merge(self, states: Sequence[MetricsState]) -> None:
        """Replace what was accumulated by these states, which include its own. Their order does not matter."""
        ...


class Task(Protocol):
    """Turns a batch into loss sums and a validation set into metrics."""

    def weight(self, batch: Batch) -> Tensor | int:
        """The batch's part of the global weight that losses are divided by; known before the forward pass."""
        ...

    def loss(self, outputs: Any, batch: Batch) -> LossSums: ...
    def metrics(self) -> Metrics:
        """Empty metrics for one evaluation."""
        ...

    def train_metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        """Means for the log from metric sums over an interval."""
        ...
