"""The training step: forward and backward of every micro-batch, gradient reduction and the optimizer update.

A step never reads a value back to the host. Where the loss or the gradient norm is not finite, no weight, buffer or
optimizer state changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.distributed.strategy import ParallelStrategy
from reconv.models.layers.batch_norm import LayerState
from reconv.optim import ClipGrad, ModelEma, Optimizer
from reconv.precision import PrecisionPolicy
from reconv.tasks.task import LossSums, Task

if TYPE_CHECKING:
    from reconv.trainer.cuda_graph import StepGraphs
    from reconv.trainer.oom import OomRetry

Preprocess = Callable[[Batch, int | Tensor], Batch]  # on the device: normalize, flip, mix; a pure function
Annotate = Callable[[str], AbstractContextManager[None]]  # names a part of the step for profilers and timers

_LOSS = "__loss__"  # the key of the loss among the metric sums
# Added to exceptions raised during the update: the step must not be retried.
UPDATE_STARTED = "the weights were being updated"


@dataclass(frozen=True, slots=True)
class StepResult:
    """Sums over the global batch and whether the update was applied, all left on the device."""

    loss: Tensor  # summed over the global batch
    weight: Tensor | float  # divisor: the weight of the global batch
    metrics: dict[str, Tensor]
    grad_norm: Tensor
    ok: Tensor  # bool: loss and gradient norm are finite, the update was applied


@dataclass(frozen=True, slots=True)
class StepScalars:
    """The values that depend on the step number: Python numbers, or 0-d tensors on the device in a captured step."""

    step: int | Tensor
    lr: float | Tensor
    ema_weight: float | Tensor  # 1 - decay


def are_finite(loss: Tensor, grad_norm: Tensor) -> Tensor:
    """Whether both numbers are finite, as a bool on the device: 0 times infinity or NaN is NaN.

    Three kernel launches; torch.isfinite of both takes nine.
    """
    return loss * 0 == grad_norm * 0


def no_annotation(name: str) -> AbstractContextManager[None]:
    """An `Annotate` that does nothing."""
    return nullcontext()


@dataclass(frozen=True, slots=True)
class TrainStep:
    """Trains a model on one global batch, given as micro-batches.

    `graphs` captures the step as a CUDA graph and replays it; `oom_retry` repeats it with smaller micro-batches after
    running out of memory. Without them every operation is launched eagerly and errors are raised.
    """

    model: Callable[..., Any]
    task: Task
    preprocess: Preprocess
    layer_state: LayerState
    precision: PrecisionPolicy
    optimizer: Optimizer
    ema: ModelEma | None
    strategy: ParallelStrategy
    lr_schedule: Callable[[int], float]
    ordered_reduction: bool  # one pass per group: gradients are added in the same order on any number of ranks
    clip_grad: ClipGrad | None = None
    annotate: Annotate = no_annotation
    step_boundary: Callable[[], None] = lambda: None  # for devices that collect lazy operations into graphs
    graphs: StepGraphs | None = None
    oom_retry: OomRetry | None = None

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch."""
        if self.oom_retry is None:
            result = self.run_once(step, micro_batches)
        else:
            result = self.oom_retry.run(self, step, micro_batches)
        self.step_boundary()
        return result

    def run_once(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Run the step once, eagerly or as a captured graph."""
        ema_weight = 0.0 if self.ema is None else self.ema.weight_at(step)
        scalars = StepScalars(step, self.lr_schedule(step), ema_weight)
        if self.graphs is None:
            return self._run_eager(scalars, micro_batches)
        return self.graphs.run(self._run_eager, scalars, micro_batches)

    def _run_eager(self, scalars: StepScalars, micro_batches: Sequence[Batch]) -> StepResult:
        """Launch every operation of the step; nothing but `scalars` depends on the step number."""
        weight = self.strategy.all_reduce(sum(self.task.weight(batch) for batch in micro_batches))
        self.optimizer.zero_grad()
        batches = list(self.forward_batches(micro_batches))
        if self.strategy.is_pipeline:
            sums = self._run_pipeline(scalars.step, batches, weight)
        else:
            sums = [self._forward_backward(scalars.step, batch, weight, batch is batches[-1]) for batch in batches]
        totals = self.strategy.sum_metrics([{_LOSS: s.loss.detach(), **s.metrics} for s in sums])
        loss = totals.pop(_LOSS)
        try:
            grad_norm, ok = self._update(scalars, loss)
        except Exception as error:
            error.add_note(UPDATE_STARTED)
            raise
        return StepResult(loss, weight, totals, grad_norm, ok)

    def reset(self) -> None:
        """Drop the gradients and batch statistics of a step that did not reach its update."""
        self.layer_state.discard()
        self.optimizer.zero_grad()

    def forward_batches(self, micro_batches: Sequence[Batch]) -> Iterator[Batch]:
        """The batches that go through the model one after another."""
        for batch in micro_batches:
            yield from batch.by_group() if self.ordered_reduction else (batch,)

    def _forward_backward(self, step: int | Tensor, batch: Batch, weight: Tensor | float, is_last: bool) -> LossSums:
        with self.strategy.no_sync(enabled=not is_last):
            with self.annotate("forward"):
                prepared = self.preprocess(batch, step)
                self.layer_state.set_micro_batch(prepared, step)
                with self.precision.autocast():
                    outputs = self.model(prepared["images"])
                sums = self.task.loss(outputs, prepared)
            with self.annotate("backward"):
                self.precision.scale(sums.loss / weight).backward()
            self.step_boundary()
        return sums

    def _run_pipeline(self, step: int | Tensor, batches: Sequence[Batch], weight: Tensor | float) -> list[LossSums]:
        """Forward and backward through pipeline stages on several ranks; the last stage returns the sums."""
        prepared = [self.preprocess(batch, step) for batch in batches]
        sums: list[LossSums] = []

        def loss(outputs: Any, index: int) -> Tensor:
            sums.append(self.task.loss(outputs, prepared[index]))
            return self.precision.scale(sums[-1].loss / weight)

        images = [batch["images"] for batch in prepared]
        self.strategy.pipeline_step(
            images, lambda index: self.layer_state.set_micro_batch(prepared[index], step), loss, self.precision.autocast
        )
        self.step_boundary()
        return sums

    def _update(self, scalars: StepScalars, loss: Tensor) -> tuple[Tensor, Tensor]:
        """Update weights, running statistics and EMA; returns the norm before clipping and whether all was finite."""
        with self.annotate("optimizer"):
            self.strategy.reduce_gradients()
            grads = self.optimizer.grads()
            self.precision.unscale(grads)
            grad_norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
            ok = are_finite(loss, grad_norm)
            if self.clip_grad is not None:
                self.clip_grad(self.optimizer.params_with_grad(), grad_norm)
            self.optimizer.step(scalars.lr, ok)
            self.layer_state.commit(ok)
            if self.ema is not None:
                self.ema.update(scalars.ema_weight, ok)
            self.precision.update(ok)
        return grad_norm, ok
