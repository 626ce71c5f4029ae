"""The batch: what the loader hands to the engine and the engine to the task.

Owns the container and how it is cut into groups. Refuses to know what the tensors mean. Invariant: every tensor has
one row per sample, rows are in position order, and the group sizes add up to the number of rows.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Batch:
    """One micro-batch: named tensors [n, ...], positions in the run's sample stream [n], and group sizes."""

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

    def map(self, move: Callable[[Tensor], Tensor]) -> Batch:
        """The same batch with every tensor (positions too) passed through `move`."""
        return Batch({name: move(t) for name, t in self.tensors.items()}, move(self.positions), self.groups)

    def by_group(self) -> Iterator[Batch]:
        """The batch's groups, one Batch each, in position order."""
        return self.parts(1)

    def parts(self, num_groups: int) -> Iterator[Batch]:
        """The batch in parts of so many groups, the last perhaps of fewer, in position order."""
        start = 0
        for first in range(0, len(self.groups), num_groups):
            groups = self.groups[first : first + num_groups]
            rows = slice(start, start + sum(groups))
            yield Batch({k: t[rows] for k, t in self.tensors.items()}, self.positions[rows], groups)
            start = rows.stop


class Copied(Protocol):
    """A copy of a batch to the device that may still be under way."""

    def query(self) -> bool:
        """Whether it has arrived."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...
