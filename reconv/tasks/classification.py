"""Image classification: cross-entropy, plain or binary, with label smoothing, class weights, auxiliary heads and
distillation.

Losses and training metrics are sums over samples. With class weights the loss is divided by what torch's
`cross_entropy(weight=...)` divides by: the weights of the samples' classes, or for mixed targets the number of samples.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import RecipeError, UsageError
from reconv.metrics.custom import MetricsWithCustom
from reconv.metrics.topk import ClassificationMetrics
from reconv.models.architecture import AuxOutput
from reconv.precision.policy import to_accumulate_dtype
from reconv.recipe.parts.code import CodeConfig
from reconv.tasks.base import LossSums
from reconv.tasks.binary_cross_entropy import BinaryCrossEntropy
from reconv.tasks.custom_loss import CustomLoss
from reconv.tasks.distillation import Teacher

_NUM_SAMPLES = "num_samples"
AUX_LOSS_WEIGHT = 0.3  # of auxiliary heads of other packages' models, as in the GoogLeNet paper


@dataclass(frozen=True, slots=True)
class ClassificationTask:
    """Classification into one class per image. Batches contain `images`, `targets` and, if mixed, `soft_targets`."""

    num_classes: int
    label_smoothing: float = 0.0
    smooth_over: Literal["all-classes", "other-classes"] = "all-classes"
    metric: str = "top1"
    teacher: Teacher | None = None  # in training only
    class_weights: Tensor | None = None  # float32 [num_classes] on the device of the batches; in training only
    bce: BinaryCrossEntropy | None = None  # instead of the plain cross-entropy
    mixes_targets: bool = False  # batches will have `soft_targets`
    custom_metrics: Sequence[CodeConfig] = ()
    custom_loss: CustomLoss | None = None  # the user's own instead of the plain cross-entropy; in training only

    def __post_init__(self) -> None:
        if self.smooth_over == "other-classes" and self.label_smoothing * self.num_classes > self.num_classes - 1:
            raise RecipeError(
                f"loss.label_smoothing {self.label_smoothing:g} gives the correct one of {self.num_classes} classes a "
                "lower target than the others",
                why="loss.smooth_over: other-classes gives every other class label_smoothing / (num_classes - 1)",
                hint="use a smaller value, as in --set loss.label_smoothing=0.1",
            )

    def weight(self, batch: Batch) -> Tensor | int:
        if self.class_weights is None or self.mixes_targets:
            return len(batch)
        # Sums of float32 numbers are exact in float64, so that micro-batches and ranks do not change them.
        return to_accumulate_dtype(self.class_weights[batch["targets"]]).sum()

    def loss(self, outputs: Any, batch: Batch) -> LossSums:
        """The sum of the losses, in at least fp32, and the number of correct predictions."""
        main, aux_logits, aux_weight = split_outputs(outputs)
        logits = at_least_float32(main)
        loss = self._loss(logits, batch)
        for aux in aux_logits:
            loss = loss + aux_weight * self._loss(at_least_float32(aux), batch)
        if self.teacher is not None:
            loss = self.teacher.distillation_loss(loss, logits, batch["images"])
        correct = (logits.detach().argmax(dim=1) == batch["targets"]).sum()
        return LossSums(loss, {"top1": correct} | self._num_samples(correct, len(batch)))

    def _num_samples(self, like: Tensor, num_samples: int) -> dict[str, Tensor]:
        """The divisor of the training metrics, where it is not the weight."""
        return {} if self.class_weights is None else {_NUM_SAMPLES: torch.full_like(like, num_samples)}

    def _loss(self, logits: Tensor, batch: Batch) -> Tensor:
        targets = batch.tensors.get("soft_targets", batch["targets"])
        if targets.is_floating_point():
            targets = targets.to(logits.dtype)
        smoothing = self._torch_label_smoothing(logits.shape[1])
        if self.custom_loss is not None and smoothing == 0:
            return self.custom_loss(logits, targets)
        given_loss = self.custom_loss or self.bce
        if given_loss is not None:
            if not targets.is_floating_point():
                targets = F.one_hot(targets, logits.shape[1]).to(logits.dtype)
            return given_loss(logits, targets * (1 - smoothing) + smoothing / logits.shape[1])
        weights = None if self.class_weights is None else self.class_weights.to(logits.dtype)
        return F.cross_entropy(logits, targets, weights, reduction="sum", label_smoothing=smoothing)

    def _torch_label_smoothing(self, num_classes: int) -> float:
        """The `label_smoothing` of `F.cross_entropy` that gives the same targets.

        torch spreads u over all C classes: (1 - u) t + u / C. With u = s C / (C - 1) that equals
        (1 - s) t + s (1 - t) / (C - 1), which spreads s over the other classes, also for mixed targets t.
        """
        if self.smooth_over == "all-classes" or self.label_smoothing == 0:
            return self.label_smoothing
        return min(1.0, self.label_smoothing * num_classes / (num_classes - 1))

    def metrics(self) -> ClassificationMetrics:
        if self.custom_metrics:
            return MetricsWithCustom(self.num_classes, self.custom_metrics)
        return ClassificationMetrics(self.num_classes)

    def train_metrics(self, sums: Mapping[str, float], weight: float) -> dict[str, float]:
        num_samples = sums.get(_NUM_SAMPLES, weight)
        return {name: value / num_samples for name, value in sums.items() if name != _NUM_SAMPLES}


def split_outputs(outputs: Any) -> AuxOutput:
    """The logits, the auxiliary heads' logits, and the weight of an auxiliary loss, of a model in training mode.

    Models of other packages return named tuples of `logits` and `aux_logits...`, None for a disabled head.
    """
    if isinstance(outputs, AuxOutput):
        return outputs
    if isinstance(outputs, Tensor):
        return AuxOutput(outputs, (), 0.0)
    names = getattr(outputs, "_fields", ())
    fields = dict(zip(names, outputs, strict=True)) if "logits" in names else {}
    heads = {name: value for name, value in fields.items() if name.startswith("aux") and value is not None}
    if not fields or len(heads) + 1 < sum(value is not None for value in fields.values()):
        raise UsageError(
            f"this model returns a {type(outputs).__name__} in training, not logits",
            why="supported are a tensor of logits, and named tuples of logits and aux_logits",
            hint="use a model, or options of it, that returns logits",
        )
    return AuxOutput(fields["logits"], tuple(heads.values()), AUX_LOSS_WEIGHT)


def at_least_float32(outputs: Any) -> Tensor:
    """Logits for a loss: half precision becomes float32."""
    logits: Tensor = outputs
    return logits if logits.dtype == torch.float64 else logits.float()
