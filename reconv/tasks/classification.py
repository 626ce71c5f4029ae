"""Image classification: cross-entropy in training, exact top-1 and top-5 in evaluation.

Owns the loss and the metrics. Refuses to know loops, devices and networks. Invariant: everything returned to the
engine is a sum over samples; evaluation counts are integers and its loss is summed in fp64.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import RecipeError, UsageError
from reconv.metrics.topk import ClassificationMetrics
from reconv.models.architecture import Auxiliary
from reconv.tasks.distillation import Teacher
from reconv.tasks.task import LossSums

FOREIGN_HEAD_WEIGHT = 0.3  # GoogLeNet's, which says it of its own heads


@dataclass(frozen=True, slots=True)
class ClassificationTask:
    """The task: batches with `images` and `targets` (and `soft_targets` when images are mixed)."""

    num_classes: int
    label_smoothing: float = 0.0
    smooth_over: Literal["all-classes", "other-classes"] = "all-classes"
    metric: str = "top1"
    teacher: Teacher | None = None  # in training only

    def __post_init__(self) -> None:
        if self.smooth_over == "other-classes" and self.label_smoothing * self.num_classes > self.num_classes - 1:
            raise RecipeError(
                f"loss.label_smoothing {self.label_smoothing:g} leaves the right one of {self.num_classes} classes "
                "less than each of the others",
                why="loss.smooth_over: other-classes gives every other class share / (classes - 1)",
                then="a smaller share, as in --set loss.label_smoothing=0.1",
            )

    def weight(self, batch: Batch) -> int:
        return len(batch)

    def loss(self, outputs: Any, batch: Batch) -> LossSums:
        """The cross-entropy sum, in at least fp32, and the number of right answers."""
        main, heads, head_weight = _answers(outputs)
        logits = _full(main)
        loss = self._cross_entropy(logits, batch)
        for head in heads:
            loss = loss + head_weight * self._cross_entropy(_full(head), batch)
        if self.teacher is not None:
            loss = self.teacher.blend(loss, logits, batch["images"])
        right = (logits.detach().argmax(dim=1) == batch["targets"]).sum()
        return LossSums(loss, {"top1": right})

    def _cross_entropy(self, logits: Tensor, batch: Batch) -> Tensor:
        targets = batch.tensors.get("soft_targets", batch["targets"])
        if targets.is_floating_point():
            targets = targets.to(logits.dtype)
        smoothing = self._uniform_share(logits.shape[1])
        return F.cross_entropy(logits, targets, reduction="sum", label_smoothing=smoothing)

    def _uniform_share(self, num_classes: int) -> float:
        """The share spread over all classes that gives the targets of either form, mixed targets included.

        (1 - u) t + u / C with u = s C / (C - 1) is (1 - s) t + s (1 - t) / (C - 1).
        """
        if self.smooth_over == "all-classes" or self.label_smoothing == 0:
            return self.label_smoothing
        return min(1.0, self.label_smoothing * num_classes / (num_classes - 1))

    def metrics(self) -> ClassificationMetrics:
        return ClassificationMetrics(self.num_classes)

    def train_metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        return {name: value / weight for name, value in sums.items()}


def _answers(outputs: Any) -> Auxiliary:
    """What a network gave in training: logits, those of its auxiliary heads, and the weight of each head's loss.

    Other packages' networks name theirs `logits` and `aux_logits...`, None where a head is switched off.
    """
    if isinstance(outputs, Auxiliary):
        return outputs
    if isinstance(outputs, Tensor):
        return Auxiliary(outputs, (), 0.0)
    names = getattr(outputs, "_fields", ())
    fields = dict(zip(names, outputs, strict=True)) if "logits" in names else {}
    heads = {name: value for name, value in fields.items() if name.startswith("aux") and value is not None}
    if not fields or len(heads) + 1 < sum(value is not None for value in fields.values()):
        raise UsageError(
            f"this network answers with a {type(outputs).__name__} in training, not with logits",
            why="known are a tensor of logits, and named tuples of logits and aux_logits",
            then="take a network, or options of it, that gives one answer per image",
        )
    return Auxiliary(fields["logits"], tuple(heads.values()), FOREIGN_HEAD_WEIGHT)


def _full(outputs: Any) -> Tensor:
    """The logits in at least fp32: half precision is for the network, not for the loss."""
    logits: Tensor = outputs
    return logits if logits.dtype == torch.float64 else logits.float()
