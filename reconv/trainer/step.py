"""The training step: forward and backward of every micro-batch, gradient reduction and the optimizer update.

A step never reads a value back to the host. Where the loss or the gradient norm is not finite, no weight, buffer or
optimizer state changes.

A step depends on its number only through `StepScalars` (step, learning rate, EMA weight). After three eager steps of
a kind (groups, shapes, dtypes) it is captured as a CUDA graph, with scalars and batch in fixed tensors; a replay
computes what the eager step would (tests/trainer/test_cuda_graph.py, and tests/gpu/test_gpu_training.py on a device).

A step that does not fit into memory is repeated with micro-batches of half as many groups. Only what comes before the
update is repeated, so the result does not change (tests/laws/test_law_recompute.py).
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconv.build.model import build_graph_capture
from reconv.core.batch import Batch, Preprocess
from reconv.core.bits import bits_sum
from reconv.core.errors import ResourceError
from reconv.device import is_out_of_memory
from reconv.device.graphs import CallGraphs, GraphCapture, batch_shape
from reconv.distributed.strategy import ParallelStrategy
from reconv.logging.phases import Phase, PhaseTimer
from reconv.logging.run_logger import RunLogger
from reconv.models.layers.batch_norm import LayerState
from reconv.optim import (
    ClipGrad,
    ModelEma,
    Optimizer,
    build_clip_grad,
)
from reconv.precision import PrecisionPolicy
from reconv.tasks.base import LossSums, Task
from reconv.trainer.train_state import TrainState, build_train_preprocess, parallelize

if TYPE_CHECKING:
    from reconv.core.bits import StateDigests
    from reconv.trainer.prepare import PreparedRun


Annotate = Callable[[str], AbstractContextManager[None]]  # names a part of the step for profilers and timers

RunStep = Callable[["StepScalars", Sequence[Batch]], "StepResult"]
WARMUP_STEPS = 3  # eager steps first: they allocate every tensor and choose every algorithm that a capture must find
DDP_WARMUP_STEPS = 11  # DistributedDataParallel times its first ten steps, which cannot be captured

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
    """Bool on the device, True if both numbers are finite: 0 times infinity or NaN is NaN.

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
    digests: StateDigests | None = None  # with engine.verify: compared before the update, and renewed after it

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch."""
        if self.oom_retry is None:
            result = self.run_once(step, micro_batches)
        else:
            result = self.oom_retry.run(self, step, micro_batches)
        self.step_boundary()
        return result

    def repeat(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Run a step again, in the way in which it ran before: eagerly or as a captured graph."""
        if self.oom_retry is not None:
            micro_batches = self.oom_retry.split(micro_batches)
        result = self.run_once(step, micro_batches, is_repeated=True)
        self.step_boundary()
        return result

    def run_once(self, step: int, micro_batches: Sequence[Batch], is_repeated: bool = False) -> StepResult:
        """Run the step once, eagerly or as a captured graph."""
        ema_weight = 0.0 if self.ema is None else self.ema.weight_at(step)
        scalars = StepScalars(step, self.lr_schedule(step), ema_weight)
        if self.graphs is None:
            return self._run_eager(scalars, micro_batches)
        return self.graphs.run(self._run_eager, scalars, micro_batches, is_repeated)

    def local_gradients(self, step: int, micro_batches: Sequence[Batch], apart: bool) -> Tensor:
        """The digest of this rank's gradients of a batch before they are added to those of other ranks.

        Nothing is updated. `apart`: the sum of the digests of each pass, else the digest of their gradients' sum.
        """
        weight = self.strategy.all_reduce(sum(self.task.weight(batch) for batch in micro_batches))
        self.optimizer.zero_grad()
        digests: list[Tensor] = []
        model, parameters = self.strategy.unwrap(self.model), self.strategy.parameters()

        def collect() -> None:
            digests.extend(bits_sum(p.grad) for p in parameters if p.grad is not None)

        for batch in list(self.forward_batches(micro_batches)):
            self._one_pass(model, step, batch, weight)
            if apart:
                collect()
                self.optimizer.zero_grad()
        if not apart:
            collect()
        self.reset()
        return torch.stack(digests).sum()

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
            return self._one_pass(self.model, step, batch, weight)

    def _one_pass(
        self, model: Callable[..., Any], step: int | Tensor, batch: Batch, weight: Tensor | float
    ) -> LossSums:
        """The loss of one batch, and its gradients added to those that are there."""
        with self.annotate("forward"):
            prepared = self.preprocess(batch, step)
            self.layer_state.set_micro_batch(prepared, step)
            with self.precision.autocast():
                outputs = model(prepared["images"])
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
            if self.digests is not None:
                self.digests.check(scalars.step)
            self.optimizer.step(scalars.lr, ok)
            self.layer_state.commit(ok)
            if self.ema is not None:
                self.ema.update(scalars.ema_weight, ok)
            self.precision.update(ok)
            if self.digests is not None:
                self.digests.record()
        return grad_norm, ok


@dataclass(slots=True)
class StepGraphs:
    """Steps as CUDA graphs, one for each shape of batch: they run eagerly first, then they are captured and replayed.

    A replayed step computes what the eager one would, from the batch and the step's scalars alone.
    """

    device: GraphCapture
    warmup_steps: int = WARMUP_STEPS
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    _num_runs: dict[Hashable, int] = field(default_factory=dict)
    _graphs: CallGraphs[StepResult] = field(init=False)

    def __post_init__(self) -> None:
        self._graphs = CallGraphs(self.device, _cloned, partial(self.phases.during, Phase.KERNELS))

    def run(
        self, run_eager: RunStep, scalars: StepScalars, micro_batches: Sequence[Batch], is_repeated: bool = False
    ) -> StepResult:
        """Run a step eagerly the first times it sees a shape of batch, then capture and replay it.

        A step that is repeated runs as it did before, and does not count.
        """
        shape = tuple(batch_shape(batch) for batch in micro_batches)
        values = (int(scalars.step), float(scalars.lr), float(scalars.ema_weight))
        if shape not in self._graphs and is_repeated:
            return self.device.run_on_stream(lambda: run_eager(scalars, micro_batches))
        if shape not in self._graphs:
            num_runs = self._num_runs[shape] = self._num_runs.get(shape, 0) + 1
            if num_runs <= self.warmup_steps or self._graphs.is_full:
                return self.device.run_on_stream(lambda: run_eager(scalars, micro_batches))
            self._graphs.capture(
                shape, lambda own, batches: run_eager(StepScalars(*own), batches), values, micro_batches
            )
        return self._graphs.replay(shape, values, micro_batches)


def _cloned(result: StepResult) -> StepResult:
    """The result in memory of its own."""
    weight = result.weight.clone() if isinstance(result.weight, Tensor) else result.weight
    return replace(
        result,
        loss=result.loss.clone(),
        weight=weight,
        metrics={name: value.clone() for name, value in result.metrics.items()},
        grad_norm=result.grad_norm.clone(),
        ok=result.ok.clone(),
    )


def build_train_step(
    run: PreparedRun,
    train_state: TrainState,
    logger: RunLogger,
    *,
    annotate: Annotate = no_annotation,
    micro_batch_size: MicroBatchSize | None = None,
    strategy: ParallelStrategy | None = None,
    graph_capture: GraphCapture | None = None,
    digests: StateDigests | None = None,
) -> TrainStep:
    """The training step: captured as a CUDA graph and repeated after running out of memory where that is possible.

    Without `micro_batch_size` an out-of-memory error is raised. `graph_capture` is what the rest of the run captures
    with; without it the step has its own.
    """
    recipe, plan, network = run.recipe, run.plan, train_state.network
    strategy = strategy or parallelize(run, network, train_state.loss)
    capture = graph_capture or build_graph_capture(recipe, run.device, run.process_group)
    oom_retry = None
    # One of several ranks cannot repeat a step on its own: the others are in the middle of theirs.
    if micro_batch_size is not None and recipe.batch.micro == "auto" and not run.process_group.is_distributed:
        oom_retry = OomRetry(micro_batch_size, run.device.release_memory, logger.warning)
    graphs, model = _build_graphs(run, capture, strategy, network.forward)
    return TrainStep(
        model=model,
        task=train_state.task,
        preprocess=build_train_preprocess(network, recipe, plan.num_classes, run.device),
        layer_state=network.layers,
        precision=network.precision,
        optimizer=train_state.optimizer,
        ema=train_state.ema,
        strategy=strategy,
        lr_schedule=train_state.lr_schedule,
        clip_grad=build_clip_grad(recipe.optimizer, network.model),
        ordered_reduction=recipe.parallel.reduce == "ordered",
        annotate=annotate,
        step_boundary=run.device.step_boundary,
        graphs=graphs,
        oom_retry=oom_retry,
        digests=digests,
    )


def _build_graphs(
    run: PreparedRun, capture: GraphCapture | None, strategy: ParallelStrategy, forward: Callable[..., object]
) -> tuple[StepGraphs | None, Callable[..., object]]:
    """Capturer of steps, and the forward function; DistributedDataParallel is built on the stream of the capture."""
    if capture is None:
        return None, strategy.wrap(forward)
    if not run.process_group.is_distributed:
        return StepGraphs(capture, phases=run.phases), strategy.wrap(forward)
    return StepGraphs(capture, DDP_WARMUP_STEPS, run.phases), capture.run_on_stream(lambda: strategy.wrap(forward))


@dataclass(slots=True)
class MicroBatchSize:
    """The largest micro-batch known to fit, in groups; saved in checkpoints."""

    max_groups: int

    def halve(self, tried: int) -> None:
        """Take half of the groups that were tried, or the next smaller number that divides them.

        Splitting again then splits at the same places, so a resumed run adds gradients in the same order.
        """
        self.max_groups = next(size for size in range(tried // 2, 0, -1) if tried % size == 0)


@dataclass(frozen=True, slots=True)
class OomRetry:
    """Repeats a step that ran out of memory with micro-batches of half the size."""

    micro_batch_size: MicroBatchSize
    release_memory: Callable[[], None]  # returns the allocator's cached memory to the device
    warn: Callable[[str, int], None]  # text, step

    def run(self, train_step: TrainStep, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Run the step, with smaller and smaller micro-batches until it fits."""
        while True:
            split = self.split(micro_batches)
            try:
                return train_step.run_once(step, split)
            except Exception as error:
                num_groups = max(len(batch.groups) for batch in split)
                can_repeat = UPDATE_STARTED not in getattr(error, "__notes__", ())
                if not (is_out_of_memory(error) and can_repeat and num_groups > 1):
                    raise
            # Outside the handler: the traceback of the error holds the activations that did not fit.
            before = max(len(batch) for batch in split)
            self.micro_batch_size.halve(num_groups)
            train_step.reset()
            self.release_memory()
            after = max(len(batch) for batch in self.split(micro_batches))
            self.warn(f"out of memory with micro-batches of {before}: repeating the step with {after}", step)

    def split(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        """The micro-batches, none larger than what is known to fit."""
        return [part for batch in micro_batches for part in batch.split(self.micro_batch_size.max_groups)]


def out_of_memory_error(run: PreparedRun) -> ResourceError:
    """The error for a run that does not fit, with the largest micro-batch to try next."""
    recipe, plan = run.recipe, run.plan
    # With one process `auto` has already tried every size down to one group.
    is_smallest = recipe.batch.micro == "auto" and run.process_group.world_size == 1
    if plan.micro_groups > 1 and not is_smallest:
        why = f"micro-batches of {plan.micro_batch} images do not fit"
        hint = f"use smaller ones, also with --resume: --set batch.micro={plan.micro_groups // 2 * plan.group}"
    elif recipe.batch.group == "micro":
        why = f"micro-batches of {plan.micro_batch} images do not fit"
        smaller = max(1, plan.micro_batch // 2)
        hint = f"use smaller ones: --set batch.micro={smaller} (each is a batch norm group: results change)"
    else:
        why = f"a batch norm group of {min(plan.group, plan.micro_batch)} images does not fit, and groups are not split"
        saving = (
            "" if recipe.memory.activation_checkpointing != "off" else "--set memory.activation_checkpointing=auto, or "
        )
        hint = f"{saving}smaller groups: --set batch.group=N (results change)"
    return ResourceError("out of memory", where=run.device.describe(), why=why, hint=hint)
