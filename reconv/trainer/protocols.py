"""What the engine asks of the other rooms. Nothing here knows a task, a model, a device or a file format."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

from torch import Tensor

from reconv.batch import Batch

Tensors = Mapping[str, Tensor]
Json = Mapping[str, Any]
Result = TypeVar("Result")


class Stateful(Protocol):
    """A part whose tensors are saved and restored by name."""

    def state_dict(self) -> dict[str, Tensor]: ...
    def load_state_dict(self, state: Tensors) -> None: ...


class TrainBatches(Protocol):
    """The training stream, seekable to any step at no cost."""

    def steps(self, start: int, stop: int) -> Iterator[Sequence[Batch]]:
        """This rank's micro-batches of each step in [start, stop), on the device."""
        ...


class Prepare(Protocol):
    """DeviceProtocol-side preparation of a batch (normalise, flip, mix): a pure function of batch and step."""

    def __call__(self, batch: Batch, step: int | Tensor) -> Batch: ...


class Layers(Protocol):
    """The network's stateful layers (batch norm, dropout), driven per micro-batch."""

    def set_micro_batch(self, batch: Batch, step: int | Tensor) -> None:
        """Tell the layers which groups and positions come next."""
        ...

    def discard(self) -> None:
        """Drop what the passes of an unfinished step have recorded."""
        ...

    def commit(self, ok: Tensor) -> None:
        """Move running statistics once, by the weighted mean over the step's groups, unless not ok."""
        ...


class PrecisionProtocol(Stateful, Protocol):
    """One policy: cast, scale, unscale, finite."""

    def autocast(self) -> AbstractContextManager[None]: ...
    def scale(self, loss: Tensor) -> Tensor: ...
    def unscale(self, grads: Sequence[Tensor]) -> None: ...
    def update(self, ok: Tensor) -> None: ...


class OptimizerProtocol(Stateful, Protocol):
    """Updates parameters in place; a step that is not ok changes nothing, without a host read."""

    def step(self, lr: float | Tensor, ok: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def grads(self) -> list[Tensor]: ...


class EmaProtocol(Stateful, Protocol):
    """A moving average of the network (EMA)."""

    def weight_at(self, step: int) -> float:
        """How far the average moves towards the network at a step, counted from 0."""
        ...

    def update(self, weight: float | Tensor, ok: Tensor) -> None: ...


class DeviceProtocol(Protocol):
    """The few things that differ between chips."""

    kind: str  # cpu, cuda, mps, hpu

    def copy_to_host(self, value: Tensor) -> Callable[[], Tensor]:
        """Start copying a small tensor to the host; call the result to wait for it."""
        ...

    def synchronize(self) -> None: ...
    def step_boundary(self) -> None: ...
    def peak_memory_bytes(self) -> int: ...


class Captures(Protocol):
    """A device that can record work and launch it again as a whole."""

    def run_on_stream(self, work: Callable[[], Result]) -> Result:
        """Do work where it would be recorded, so that everything it needs is there when it is."""
        ...

    def capture(self, work: Callable[[], Result]) -> tuple[Result, Callable[[], None]]:
        """Record work without doing it: its results' places, and the call that does it."""
        ...


EvalBatches = Iterable[Batch]
