"""Training steps as CUDA graphs: the first steps run eagerly, later ones replay a captured graph.

A replayed step computes what the eager one would, from the batch and the step's scalars alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.logging.phases import Phase, PhaseTimer
from reconv.trainer.step import StepResult, StepScalars

WARMUP_STEPS = 3  # eager steps first: they allocate every tensor and choose every algorithm that a capture must find
DDP_WARMUP_STEPS = 11  # DistributedDataParallel times its first ten steps, which cannot be captured
MAX_GRAPHS = 16  # each keeps the memory of its activations

BatchShape = tuple[object, ...]
RunStep = Callable[[StepScalars, Sequence[Batch]], StepResult]
T = TypeVar("T")


class GraphCapture(Protocol):
    """A device that captures work and replays it as a whole."""

    def run_on_stream(self, work: Callable[[], T]) -> T:
        """Run work on the stream that is captured, so that a later capture finds everything it needs."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture work without running it; returns its output tensors and the call that replays it."""
        ...


@dataclass(frozen=True, slots=True)
class _CapturedStep:
    """A captured step with the tensors that hold its inputs and outputs."""

    scalars: tuple[Tensor, Tensor, Tensor]
    batches: tuple[Batch, ...]
    result: StepResult
    replay: Callable[[], None]

    def __call__(self, scalars: StepScalars, micro_batches: Sequence[Batch]) -> StepResult:
        for tensor, value in zip(self.scalars, (scalars.step, scalars.lr, scalars.ema_weight), strict=True):
            tensor.fill_(value)
        for own, batch in zip(self.batches, micro_batches, strict=True):
            for name, tensor in own.tensors.items():
                tensor.copy_(batch[name], non_blocking=True)
            own.positions.copy_(batch.positions, non_blocking=True)
        self.replay()
        return _cloned(self.result)


@dataclass(slots=True)
class StepGraphs:
    """One captured graph for each shape of batch."""

    device: GraphCapture
    warmup_steps: int = WARMUP_STEPS
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    _num_runs: dict[BatchShape, int] = field(default_factory=dict)
    _captured: dict[BatchShape, _CapturedStep] = field(default_factory=dict)

    def run(self, run_eager: RunStep, scalars: StepScalars, micro_batches: Sequence[Batch]) -> StepResult:
        """Run a step eagerly the first times it sees a shape of batch, then capture and replay it."""
        shape = tuple(_shape(batch) for batch in micro_batches)
        if shape not in self._captured:
            num_runs = self._num_runs[shape] = self._num_runs.get(shape, 0) + 1
            if num_runs <= self.warmup_steps or len(self._captured) == MAX_GRAPHS:
                return self.device.run_on_stream(lambda: run_eager(scalars, micro_batches))
            with self.phases.during(Phase.KERNELS):
                self._captured[shape] = self._capture(run_eager, scalars, micro_batches)
        return self._captured[shape](scalars, micro_batches)

    def _capture(self, run_eager: RunStep, scalars: StepScalars, micro_batches: Sequence[Batch]) -> _CapturedStep:
        device = micro_batches[0].positions.device
        batches = tuple(batch.map(torch.clone) for batch in micro_batches)
        tensors = (
            torch.tensor(scalars.step, dtype=torch.int64, device=device),
            torch.tensor(scalars.lr, dtype=torch.float64, device=device),
            torch.tensor(scalars.ema_weight, dtype=torch.float64, device=device),
        )
        result, replay = self.device.capture(lambda: run_eager(StepScalars(*tensors), batches))
        return _CapturedStep(tensors, batches, result, replay)


def _shape(batch: Batch) -> BatchShape:
    """What a capture fixes: the groups, and each tensor's name, shape, dtype and strides."""
    described = ((name, t.shape, t.dtype, t.stride()) for name, t in sorted(batch.tensors.items()))
    return (batch.groups, *described)


def _cloned(result: StepResult) -> StepResult:
    """The result in memory of its own: the next replay overwrites that of the graph."""
    weight = result.weight.clone() if isinstance(result.weight, Tensor) else result.weight
    return replace(
        result,
        loss=result.loss.clone(),
        weight=weight,
        metrics={name: value.clone() for name, value in result.metrics.items()},
        grad_norm=result.grad_norm.clone(),
        ok=result.ok.clone(),
    )
