"""The ranks of a run as one of them sees them; `ProcessGroup` itself is a single process.

torch.distributed is used in `distributed_group`, which is loaded only when there is more than one process. Every rank
makes the same calls in the same order.

Ranks get the groups of a batch in position order. Rank 0 alone resolves the recipe, locks the run directory and reads
and writes checkpoints; its results and errors reach the others through `on_rank0`
(tests/laws/test_law_ranks_resume.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, TypeVar

from torch import nn

from reconv.core.batch import Batch
from reconv.core.errors import ReconvError
from reconv.distributed.environment import SINGLE_PROCESS, LaunchEnv, read_launch_env
from reconv.distributed.strategy import Number, ParallelStrategy, StrategyConfig

T = TypeVar("T")

# How a rank leaves: it has finished; all ranks stop at the same step; or it fails, and takes the others with it.
Outcome = Literal["finished", "stopped", "failed"]


@dataclass(frozen=True, slots=True)
class Pace:
    """Seconds per step that a rank needs for itself: all ranks wait for the one that needs most."""

    wait_s: float  # for its data
    forward_s: float

    @property
    def local_s(self) -> float:
        return self.wait_s + self.forward_s


@dataclass(frozen=True, slots=True)
class ProcessGroup:
    """The ranks of a run and their collectives. This class is the group of a single process."""

    launch_env: LaunchEnv = SINGLE_PROCESS

    is_distributed: ClassVar[bool] = False  # whether torch.distributed connects its ranks, were it only one

    @classmethod
    def single(cls) -> ProcessGroup:
        return cls()

    @property
    def is_authenticated(self) -> bool:
        """True if all ranks have proved that they know the secret of the run."""
        return True

    @property
    def rank(self) -> int:
        return self.launch_env.rank

    @property
    def world_size(self) -> int:
        return self.launch_env.world_size

    @property
    def is_rank0(self) -> bool:
        """True if this process writes the run directory and prints to the terminal."""
        return self.rank == 0

    def all_reduce(self, value: Number) -> Number:
        """The sum over all ranks."""
        return value

    def all_reduce_max(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The maximum of each number over all ranks; with several ranks that of the previous call, so no rank waits."""
        return tuple(numbers)

    def all_gather(self, item: T) -> list[T]:
        """The items of all ranks, in rank order."""
        return [item]

    def exchange_batches(self, batches: Sequence[Batch], shift: int) -> list[Batch]:
        """Send batches to the rank `shift` places further, and return those of the rank as many places before."""
        return list(batches)

    def on_rank0(self, function: Callable[[], T]) -> T:
        """Run a function on rank 0; all ranks return its result, or raise its error."""
        return function()

    def broadcast(self, item: T) -> T:
        """The item of rank 0."""
        return self.on_rank0(lambda: item)

    def parallelize(self, model: nn.Module, config: StrategyConfig) -> ParallelStrategy:
        """Train a model on all ranks; call it when its weights are loaded and its frozen parameters are frozen."""
        return ParallelStrategy()

    def set_phase(self, phase: str) -> None:
        """Announce what this rank does from now on, for the error message should it be lost."""

    def set_pace(self, pace: Pace) -> None:
        """Send the pace of this rank with its next heartbeat."""

    def paces(self) -> Mapping[int, tuple[str, Pace]]:
        """The host and the last pace of each rank that has sent one, this one included."""
        return {}

    def on_lost_rank(self, heartbeat_timeout_s: float, callback: Callable[[ReconvError], None]) -> None:
        """Call back before this process is aborted because another rank was silent for that time, or has failed."""

    def diagnose(self, error: BaseException) -> ReconvError | None:
        """The failure of another rank, if that is what has caused an error here."""
        return None

    def report_failure(self, error: ReconvError) -> bool:
        """Send the error that ends this rank to the others. Returns whether one of them prints the same error."""
        return False

    def close(self, outcome: Outcome = "finished") -> None:
        """Leave the other ranks."""


def open_process_group(
    launch_env: LaunchEnv | None = None, device: str = "cpu", if_lost: str | None = None
) -> ProcessGroup:
    """Join the process group that the launcher describes. Without a launcher it has this process only.

    `if_lost` is what the user can do when a rank is lost, if not resume a run.
    """
    launch_env = read_launch_env() if launch_env is None else launch_env
    if launch_env == replace(SINGLE_PROCESS, restart_count=launch_env.restart_count):
        return ProcessGroup(launch_env)
    from reconv.distributed.torch_group import join

    process_group = join(launch_env, device)
    process_group.monitor.if_lost = if_lost or process_group.monitor.if_lost
    return process_group
