"""The batch that the loader gives to the training step, and the step to the task.

Below every other package, because models and devices take batches too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: named tensors [n, ...], positions in the sample stream [n] in order, and group sizes.

    The group sizes add up to n.
    """

    tensors: Mapping[str, Tensor]
    positions: Tensor
    groups: tuple[int, ...]

    def __len__(self) -> int:
        return int(self.positions.shape[0])

    def __getitem__(self, name: str) -> Tensor:
        return self.tensors[name]

    def replace(self, **tensors: Tensor) -> Batch:
        """The same samples with some tensors changed or added."""
        return Batch({**self.tensors, **tensors}, self.positions, self.groups)

    def map(self, function: Callable[[Tensor], Tensor]) -> Batch:
        """The batch with a function applied to every tensor, positions included."""
        return Batch({name: function(t) for name, t in self.tensors.items()}, function(self.positions), self.groups)

    def by_group(self) -> Iterator[Batch]:
        """The groups, one batch each."""
        return self.split(1)

    def split(self, num_groups: int) -> Iterator[Batch]:
        """Batches of `num_groups` groups each; the last may have fewer."""
        start = 0
        for first in range(0, len(self.groups), num_groups):
            groups = self.groups[first : first + num_groups]
            rows = slice(start, start + sum(groups))
            yield Batch({k: t[rows] for k, t in self.tensors.items()}, self.positions[rows], groups)
            start = rows.stop


class CopyEvent(Protocol):
    """A copy to the device that may not have finished, like a `torch.cuda.Event` after it."""

    def query(self) -> bool:
        """True if the copy has finished."""
        ...

    def wait(self) -> None:
        """Let what is computed next on the device wait until it has; the host does not."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...


Preprocess = Callable[[Batch, int | Tensor], Batch]  # on the device: normalize, flip, mix; a pure function


class TimingEvent(Protocol):
    """A moment in the work of a device, like a `torch.cuda.Event` that was recorded."""

    def query(self) -> bool:
        """True if the device has reached it."""
        ...

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from here to a later event; the device has reached both."""
        ...
