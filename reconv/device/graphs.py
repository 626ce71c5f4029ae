"""Calls on batches as CUDA graphs: captured once, then replayed with other inputs."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

import torch
from torch import Tensor

from reconv.core.batch import Batch

MAX_GRAPHS = 16  # each keeps the memory of its activations

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
    timed: Callable[[], AbstractContextManager[None]] = nullcontext  # around each capture
    _captured: dict[Hashable, _CapturedCall[T]] = field(default_factory=dict)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._captured

    @property
    def is_full(self) -> bool:
        return len(self._captured) == MAX_GRAPHS

    def capture(self, key: Hashable, call: Call[T], scalars: Sequence[float], batches: Sequence[Batch]) -> None:
        """Capture a call, with tensors in place of the scalars (int64 or float64) and of the batches."""
        with self.timed():
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


def batch_shape(batch: Batch) -> Hashable:
    """Shapes that a capture fixes: the groups, and each tensor's name, shape, dtype and strides."""
    described = ((name, t.shape, t.dtype, t.stride()) for name, t in sorted(batch.tensors.items()))
    return (batch.groups, *described)


def _dtype(value: float) -> torch.dtype:
    return torch.int64 if isinstance(value, int) else torch.float64
