"""Classification with any number of labels per image: binary cross-entropy of each class.

Losses and training metrics are sums over samples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconv.core.batch import Batch
from reconv.metrics.multilabel import MultilabelMetrics, f1
from reconv.tasks.base import LossSums
from reconv.tasks.binary_cross_entropy import BinaryCrossEntropy
from reconv.tasks.classification import at_least_float32, split_outputs
from reconv.tasks.custom_loss import CustomLoss


@dataclass(frozen=True, slots=True)
class MultilabelTask:
    """Batches contain `images`, multi-hot `targets` [n, num_classes] and, if mixed, `soft_targets`."""

    num_classes: int
    label_smoothing: float
    loss_fn: BinaryCrossEntropy | CustomLoss  # from logits and targets [n, num_classes] to the sum over samples
    metric: str = "map"

    def weight(self, batch: Batch) -> int:
        return len(batch)

    def loss(self, outputs: Any, batch: Batch) -> LossSums:
        """The sum of the losses, in at least fp32, and the counts of right and wrong labels."""
        main, aux_logits, aux_weight = split_outputs(outputs)
        logits = at_least_float32(main)
        soft = batch.tensors.get("soft_targets", batch["targets"]).to(logits.dtype)
        smoothed = soft * (1 - self.label_smoothing) + self.label_smoothing / 2
        loss = self.loss_fn(logits, smoothed)
        for aux in aux_logits:
            loss = loss + aux_weight * self.loss_fn(at_least_float32(aux), smoothed)
        predicted, present = logits.detach() > 0, batch["targets"] > 0
        counts = {
            "true_positives": (predicted & present).sum(),
            "false_positives": (predicted & ~present).sum(),
            "false_negatives": (~predicted & present).sum(),
        }
        return LossSums(loss, counts)

    def metrics(self) -> MultilabelMetrics:
        return MultilabelMetrics(self.num_classes)

    def train_metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        return {"micro_f1": f1(sums["true_positives"], sums["false_positives"], sums["false_negatives"])}
