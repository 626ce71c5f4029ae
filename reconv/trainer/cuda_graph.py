"""Work on batches as CUDA graphs: it runs eagerly first, then it is captured and replayed.

`StepGraphs` does this for training steps. A replayed step computes what the eager one would, from the batch and the
step's scalars alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.logging.phases import Phase, PhaseTimer
from reconv.trainer.step import StepResult, StepScalars

WARMUP_STEPS = 3  # eager steps first: they allocate every tensor and choose every algorithm that a capture must find
DDP_WARMUP_STEPS = 11  # DistributedDataParallel times its first ten steps, which cannot be captured
MAX_GRAPHS = 16  # each keeps the memory of its activations

RunStep = Callable[[StepScalars, Sequence[Batch]], StepResult]
T = TypeVar("T")
Call = Callable[[Sequence[Tensor], Sequence[Batch]], T]


class GraphCapture(Protocol):
    """A device that captures work and replays it as a whole."""

    def run_on_stream(self, work: Callable[[], T]) -> T:
        """Run work on the stream that is captured, so that a later capture finds everything it needs."""
        ...

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """Capture work without running it; returns its output tensors and the call that replays it."""
        ...


@dataclass(frozen=True, slots=True)
class _CapturedCall(Generic[T]):
    """A captured call with the tensors that hold its inputs and outputs."""

    scalars: tuple[Tensor, ...]
    batches: tuple[Batch, ...]
    outputs: T  # overwritten by the next replay
    replay: Callable[[], None]

    def __call__(self, scalars: Sequence[float], batches: Sequence[Batch]) -> T:
        for tensor, value in zip(self.scalars, scalars, strict=True):
            tensor.fill_(value)
        for own, batch in zip(self.batches, batches, strict=True):
            for name, tensor in own.tensors.items():
                tensor.copy_(batch[name], non_blocking=True)
            own.positions.copy_(batch.positions, non_blocking=True)
        self.replay()
        return self.outputs


@dataclass(slots=True)
class CallGraphs(Generic[T]):
    """The captured calls of one function, by what a capture fixes: the shapes of the batches, for instance."""

    device: GraphCapture
    clone: Callable[[T], T]  # the outputs in memory of their own: the next replay overwrites those of the graph
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    _captured: dict[Hashable, _CapturedCall[T]] = field(default_factory=dict)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    @property
    def is_full(self) -> bool:
        return len(self._captured) == MAX_GRAPHS

    def capture(self, key: Hashable, call: Call[T], scalars: Sequence[float], batches: Sequence[Batch]) -> None:
        """Capture a call, with tensors in place of the scalars (int64 or float64) and of the batches."""
        with self.phases.during(Phase.KERNELS):
            device = batches[0].positions.device
            own_scalars = tuple(torch.tensor(value, dtype=_dtype(value), device=device) for value in scalars)
            own_batches = tuple(batch.map(torch.clone) for batch in batches)
            outputs, replay = self.device.capture(lambda: call(own_scalars, own_batches))
            self._captured[key] = _CapturedCall(own_scalars, own_batches, outputs, replay)

    def replay(self, key: Hashable, scalars: Sequence[float], batches: Sequence[Batch]) -> T:
        """The outputs of a captured call for these inputs."""
        return self.clone(self._captured[key](scalars, batches))

    def clear(self) -> None:
        """Drop all graphs."""
        self._captured.clear()


@dataclass(slots=True)
class StepGraphs:
    """One captured graph for each shape of batch."""

    device: GraphCapture
    warmup_steps: int = WARMUP_STEPS
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    _num_runs: dict[Hashable, int] = field(default_factory=dict)
    _graphs: CallGraphs[StepResult] = field(init=False)

    def __post_init__(self) -> None:
        self._graphs = CallGraphs(self.device, _cloned, self.phases)

    def run(self, run_eager: RunStep, scalars: StepScalars, micro_batches: Sequence[Batch]) -> StepResult:
        """Run a step eagerly the first times it sees a shape of batch, then capture and replay it."""
        shape = tuple(batch_shape(batch) for batch in micro_batches)
        values = (int(scalars.step), float(scalars.lr), float(scalars.ema_weight))
        if shape not in self._graphs:
            num_runs = self._num_runs[shape] = self._num_runs.get(shape, 0) + 1
            if num_runs <= self.warmup_steps or self._graphs.is_full:
                return self.device.run_on_stream(lambda: run_eager(scalars, micro_batches))
            self._graphs.capture(
                shape, lambda own, batches: run_eager(StepScalars(*own), batches), values, micro_batches
            )
        return self._graphs.replay(shape, values, micro_batches)


def batch_shape(batch: Batch) -> Hashable:
    """What a capture fixes: the groups, and each tensor's name, shape, dtype and strides."""
    described = ((name, t.shape, t.dtype, t.stride()) for name, t in sorted(batch.tensors.items()))
    return (batch.groups, *described)


def _dtype(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64


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
