"""The processes of a run, seen from one of them; this file is the process_group of a process alone.

Owns what a run may ask of other processes, and the answers when there are none. Refuses to know gradients' meaning and
torch.distributed, which only `ranks` loads, once there is more than one process. Invariant: what is asked is asked by
all processes in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal, Protocol, TypeVar

from torch import Tensor, nn

from reconv.distributed.environment import LaunchEnv, read_launch_env
from reconv.errors import ReconvError

T = TypeVar("T")
Summable = TypeVar("Summable", bound=Tensor | float)
Statistics = Sequence[tuple[int, Tensor]]  # of each group: samples, and a tensor

ALONE = LaunchEnv()
# How a process ends: as it should; as all do at the same step; or by itself, and the others because of it.
Ending = Literal["done", "agreed", "failing"]


class ShardedOptimizer(Protocol):
    """An optimizer of which each process may have a share."""

    def step(self, lr: float | Tensor, ok: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def grads(self) -> list[Tensor]: ...
    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: Mapping[str, Tensor]) -> None: ...


@dataclass(frozen=True, slots=True)
class Cut:
    """How a network is cut over the devices of a pipeline."""

    parts: Callable[[nn.Module], Sequence[Sequence[tuple[str, nn.Module]]]]  # the stages of each device
    schedule: str  # grouped, interleaved or sequential


@dataclass(frozen=True, slots=True)
class Sharing:
    """How the processes of a run divide a step."""

    is_ordered: bool = False  # gradients are added in group order
    passes: tuple[int, ...] = (1,)  # forward passes of each rank
    ranks_per_group: int = 1  # above 1, a group is spread over so many
    bucket_bytes: int = 25 << 20
    compress: str = "off"
    cut: Cut | None = None


@dataclass(frozen=True, slots=True)
class Reduction:
    """What of a step's gradients travels between processes."""

    num_bytes: int = 0  # of one process in one step
    num_buckets: int = 0
    again: Callable[[], None] = lambda: None  # the same once more, with nothing beside it; asked by all processes


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """This process's place, and what it asks of the others."""

    place: LaunchEnv = ALONE

    @classmethod
    def single(cls) -> ProcessGroup:
        """One process, alone."""
        return cls()

    @property
    def rank(self) -> int:
        return self.place.rank

    @property
    def size(self) -> int:
        return self.place.size

    @property
    def is_rank0(self) -> bool:
        """Whether this process writes the run folder and talks to the terminal."""
        return self.rank == 0

    def sum(self, value: Summable) -> Summable:
        """The sum over all processes."""
        return value

    def gather(self, item: T) -> list[T]:
        """What each process has, in rank order."""
        return [item]

    def on_rank0(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, for all."""
        return make()

    def told_by_first(self, item: T) -> T:
        """What rank 0 has, for all."""
        return self.on_rank0(lambda: item)

    def agree(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The largest of each number over all processes, as of the last call where there are several."""
        return tuple(numbers)

    def share(self, model: nn.Module, sharing: Sharing) -> Shared:
        """Begin to train a network together; once its weights are in place and its parameters are frozen or not."""
        return Shared()

    def entering(self, phase: str) -> None:
        """Say what this process does from now on."""

    def shards(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Which process has which parameter, by their sizes."""
        return dict.fromkeys(sizes, 0)

    def divide(
        self, optimizer: ShardedOptimizer, parameters: Mapping[str, Tensor], owner: Mapping[str, int]
    ) -> ShardedOptimizer:
        """The optimizer of all parameters, from this process's share of it."""
        return optimizer

    def explain(self, error: BaseException) -> ReconvError | None:
        """What has happened to the others, where that is the cause of an error."""
        return None

    def post(self, error: ReconvError) -> bool:
        """Tell the others what ends this process; whether one of them tells people the same already."""
        return False

    def guard(self, lost_after_s: float, end: Callable[[ReconvError], None]) -> None:
        """Call `end` before this process ends because another is lost; that one has been silent for so long."""

    def close(self, ending: Ending = "done") -> None:
        """Leave the others; harmless when alone."""


class Shared:
    """The step of a process alone: what the engine asks of its process_group while it trains one network."""

    rank = 0
    size = 1
    is_piped = False  # whether the network's parts are in several processes

    def piped(
        self,
        images: Sequence[Tensor],
        enter: Callable[[int], None],
        loss: Callable[[Any, int], Tensor],
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """All passes of a step, where the network's parts are in several processes."""
        raise NotImplementedError

    def settle(self) -> None:
        """After running statistics have moved: give all processes the same."""

    def wrap(self, forward: Callable[..., object]) -> Callable[..., object]:
        """The forward pass of the network as a step must call it."""
        return forward

    def sum(self, value: Summable) -> Summable:
        """The sum over all processes."""
        return value

    def totals(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of each name the sum over the passes of all processes, in order."""
        return {name: fold([row[name] for row in rows]) for name in rows[0]}

    def passing(self, is_last: bool) -> AbstractContextManager[None]:
        """Around each forward and backward pass of a step."""
        return nullcontext()

    def reduce_gradients(self) -> None:
        """Add the gradients of all processes, in place."""

    def reduction(self) -> Reduction:
        """What of the last step travelled, to be measured."""
        return Reduction()

    def statistics(self, groups: Statistics) -> Statistics:
        """The groups of all processes, in order, or fewer that weigh the same."""
        return groups

    def spread(self, value: Tensor) -> Tensor:
        """The sum over the processes that hold parts of one group, through which gradients flow."""
        return value


def fold(values: Sequence[Tensor]) -> Tensor:
    """The sum, in order."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total


def open_process_group(place: LaunchEnv | None = None, device: str = "cpu") -> ProcessGroup:
    """Join the process group that the launcher describes; a single process without a launcher."""
    place = read_launch_env() if place is None else place
    if place.size == 1:
        return ProcessGroup.single()
    from reconv.distributed.ranks import join

    return join(place, device)
