"""One optimizer step: micro-batches in, updated parameters out.

Owns the order of forward, backward, reduction, gate and update, and the one division of the loss: by the weight of
the whole global batch. Refuses to know what a batch or a model is. Invariant: no host read; a step whose loss or
gradient is not finite changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.distributed.strategy import ParallelStrategy
from reconv.tasks.task import LossSums, Task
from reconv.trainer.protocols import (
    EmaProtocol,
    Layers,
    OptimizerProtocol,
    PrecisionProtocol,
    Prepare,
)

_LOSS = "the loss"  # among a pass's sums: no metric's name
UPDATING = "this happened while weights were being updated"  # so that the step cannot be done again


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step leaves on the device: sums over the global batch and whether the update was applied."""

    loss: Tensor  # sum over the global batch
    weight: Tensor | float
    metrics: dict[str, Tensor]
    grad_norm: Tensor
    ok: Tensor


@dataclass(frozen=True, slots=True)
class StepScalars:
    """What a step takes from its number: host values, or scalars on the device where the step is a captured graph."""

    step: int | Tensor
    rate: float | Tensor  # of learning
    share: float | Tensor  # of the network in its moving average


def unmarked(name: str) -> AbstractContextManager[None]:
    """Nobody wants to know which part of a step runs."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class TrainStep:
    """The step of one model on one device, in one or several micro-batches."""

    model: Callable[..., Any]
    task: Task
    prepare: Prepare
    layers: Layers
    precision: PrecisionProtocol
    optimizer: OptimizerProtocol
    average: EmaProtocol | None
    strategy: ParallelStrategy
    rate: Callable[[int], float]
    ordered: bool  # each group its own forward and backward, so that any split adds gradients in the same order
    mark: Callable[[str], AbstractContextManager[None]] = unmarked  # names the part of the step that runs inside
    boundary: Callable[[], None] = lambda: None  # after each backward pass: devices that gather work launch it

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch."""
        return self.run(self.moment(step), micro_batches)

    def moment(self, step: int) -> StepScalars:
        """The host's values at a step."""
        return StepScalars(step, self.rate(step), 0.0 if self.average is None else self.average.weight_at(step))

    def run(self, moment: StepScalars, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch with the values of a moment; nothing else of the step's number is used."""
        weight = self.strategy.all_reduce(sum(self.task.weight(batch) for batch in micro_batches))
        self.optimizer.zero_grad()
        passes = list(self._passes(micro_batches))
        if self.strategy.is_pipeline:
            sums = self._through_parts(moment.step, passes, weight)
        else:
            sums = [self._forward_backward(moment.step, batch, weight, batch is passes[-1]) for batch in passes]
        totals = self.strategy.sum_metrics([{_LOSS: s.loss.detach(), **s.metrics} for s in sums])
        loss = totals.pop(_LOSS)

        try:
            grad_norm, ok = self._update(moment, loss)
        except Exception as error:
            error.add_note(UPDATING)
            raise
        return StepResult(loss, weight, totals, grad_norm, ok)

    def _update(self, moment: StepScalars, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Move weights, statistics and average by the gradients; their norm, and whether anything was moved."""
        with self.mark("optimizer"):
            self.strategy.reduce_gradients()
            grads = self.optimizer.grads()
            self.precision.unscale(grads)
            grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            ok = torch.isfinite(loss) & torch.isfinite(grad_norm)

            self.optimizer.step(moment.rate, ok)
            self.layers.commit(ok)
            if self.average is not None:
                self.average.update(moment.share, ok)
            self.precision.update(ok)
        return grad_norm, ok

    def _passes(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        for batch in micro_batches:
            yield from batch.by_group() if self.ordered else (batch,)

    def _through_parts(self, step: int | Tensor, passes: Sequence[Batch], weight: Tensor | float) -> list[LossSums]:
        """All passes, where this process has a part of the network; sums where it is the last."""
        prepared = [self.prepare(batch, step) for batch in passes]
        kept: list[LossSums] = []

        def loss(outputs: Any, number: int) -> Tensor:
            kept.append(self.task.loss(outputs, prepared[number]))
            return self.precision.scale(kept[-1].loss / weight)

        images = [batch["images"] for batch in prepared]
        self.strategy.pipeline_step(
            images, lambda n: self.layers.set_micro_batch(prepared[n], step), loss, self.precision.autocast
        )
        self.boundary()
        return kept

    def _forward_backward(self, step: int | Tensor, batch: Batch, weight: Tensor | float, is_last: bool) -> LossSums:
        with self.strategy.no_sync(enabled=not is_last):
            with self.mark("forward"):
                prepared = self.prepare(batch, step)
                self.layers.set_micro_batch(prepared, step)
                with self.precision.autocast():
                    outputs = self.model(prepared["images"])
                sums = self.task.loss(outputs, prepared)
            with self.mark("backward"):
                self.precision.scale(sums.loss / weight).backward()
            self.boundary()
        return sums
