"""Several processes as one process_group, over torch.distributed; loaded only when there are several.

Owns joining, leaving and what processes tell each other. Refuses to know steps and run folders. Invariant: every call
is made by all processes in the same order, and each returns the same on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.device import load_collectives
from reconv.distributed.environment import LaunchEnv
from reconv.distributed.failure import leave_words
from reconv.distributed.gradients import OrderedReduce, OverlappedReduce
from reconv.distributed.heartbeat import Heartbeat
from reconv.distributed.process_group import Ending, ProcessGroup, ShardedOptimizer, Shared, Sharing, Summable
from reconv.distributed.sharded_optimizer import OptimizerShards, owners
from reconv.errors import ReconvError, RemoteRankError, UsageError

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "hpu": "cpu:gloo,hpu:hccl"}
# Losing a peer is noticed by heartbeats within a minute; a collective itself may wait for a peer that compiles.
_PATIENCE = timedelta(hours=2)
_MEETING = timedelta(minutes=5)
# What is left to do in worlds that failed: launchers end everybody with the first that ends, so all go together when
# this process ends. Not by atexit, which is not run in processes that multiprocessing has forked.
_at_exit: list[Finalize] = []


@dataclass(slots=True)
class _Vote:
    """Numbers on their way to all processes while the next step runs."""

    numbers: Tensor
    work: dist.Work


@dataclass(slots=True)
class _WindingDown:
    """What is said and done, in a thread, when another process is lost while the main thread waits for it."""

    place: LaunchEnv
    wind_down: Callable[[ReconvError], None] = lambda error: None

    def __call__(self, error: ReconvError) -> None:
        if self.place.words:
            leave_words(Path(self.place.words), self.place.rank, error)
        elif not error.is_reported:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.wind_down(error)


@dataclass(frozen=True, slots=True)
class DistributedProcessGroup(ProcessGroup):
    """One of several processes."""

    device: torch.device = field(kw_only=True)
    heartbeat: Heartbeat = field(kw_only=True)
    winding_down: _WindingDown = field(kw_only=True)
    _votes: list[_Vote] = field(default_factory=list)

    def sum(self, value: Summable) -> Summable:
        """The sum over all processes; a number becomes a tensor where reading one back would stop the device."""
        if isinstance(value, Tensor):
            total = value.detach().clone()
            dist.all_reduce(total)
            return cast(Summable, total)
        if self.device.type == "cpu":
            counted = torch.tensor(value, dtype=torch.float64)
            dist.all_reduce(counted)
            return cast(Summable, type(value)(counted.item()))
        counted = torch.tensor(value, dtype=torch.float32, device=self.device)
        dist.all_reduce(counted)
        return cast(Summable, counted)

    def gather(self, item: T) -> list[T]:
        """What each process has, in rank order."""
        items: list[T | None] = [None] * self.size
        dist.all_gather_object(items, item)
        return cast(list[T], items)

    def on_rank0(self, make: Callable[[], T]) -> T:
        """What rank 0 makes, for all; where it fails, all fail."""
        made: list[T | RemoteRankError | None] = [None]
        if self.is_rank0:
            try:
                made = [make()]
            except ReconvError as error:
                dist.broadcast_object_list([RemoteRankError.of(error, is_reported=True)])
                raise
        dist.broadcast_object_list(made)
        if isinstance(made[0], RemoteRankError):
            raise made[0]
        return cast(T, made[0])

    def agree(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The largest of each number over all processes when this was last called; the first time, zeros.

        One call late, so that nobody waits: the numbers travel while a step runs.
        """
        sent = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._votes.append(_Vote(sent, work))
        if len(self._votes) == 1:
            return (0,) * len(numbers)
        vote = self._votes.pop(0)
        vote.work.wait()
        return tuple(vote.numbers.tolist())

    def shards(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Which process has which parameter: as even as whole parameters can be."""
        return owners(sizes, self.size)

    def divide(
        self, optimizer: ShardedOptimizer, parameters: Mapping[str, Tensor], owner: Mapping[str, int]
    ) -> ShardedOptimizer:
        """The optimizer of all parameters, from this process's share of it."""
        return OptimizerShards(optimizer, parameters, owner, self.rank)

    def share(self, model: nn.Module, sharing: Sharing) -> Shared:
        """Begin to train a network together."""
        if sharing.cut is not None:
            from reconv.distributed.pipeline import Pipeline  # torch's, which nobody else needs

            return Pipeline(self, model, sharing.cut)
        return (OrderedReduce if sharing.is_ordered else OverlappedReduce)(self, model, sharing)

    def entering(self, phase: str) -> None:
        """Say what this process does from now on."""
        self.heartbeat.phase = phase

    def explain(self, error: BaseException) -> ReconvError | None:
        """What has happened to the others, where that is the cause of an error."""
        text = str(error)
        is_ours = isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "HCCL"))
        return self.heartbeat.judge() if is_ours and isinstance(error, RuntimeError) else None

    def post(self, error: ReconvError) -> bool:
        """Tell the others what ends this process; whether one of them tells people the same already."""
        return self.heartbeat.post(error)

    def guard(self, lost_after_s: float, end: Callable[[ReconvError], None]) -> None:
        """Call `end` before this process ends because another is lost; that one has been silent for so long."""
        self.heartbeat.lost_after_s = lost_after_s
        self.winding_down.wind_down = end

    def close(self, ending: Ending = "done") -> None:
        """Leave the others; with an error to tell, they notice at once, and all end together when it was told."""
        self._votes.clear()
        if ending == "done":
            self.heartbeat.leave()
        else:
            self.heartbeat.rest()
            _at_exit.append(Finalize(None, self.heartbeat.leave_together, [ending == "failing"], exitpriority=0))
        if dist.is_initialized():
            dist.destroy_process_group()


def join(place: LaunchEnv, device: str) -> DistributedProcessGroup:
    """Meet the other processes, or say who could not be met and where."""
    if device not in BACKENDS:
        raise UsageError(f"{device} cannot be shared by several processes", then="use cpu or cuda, or one process")
    load_collectives(device)
    while _at_exit:
        _at_exit.pop()()  # a process_group that this process was in before may hold the port
    if place.num_machines == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serves = place.rank == 0 and not place.store_is_served
    try:
        store = TCPStore(
            place.address, place.port, place.size, is_master=serves, timeout=_MEETING, wait_for_workers=False
        )
        # A restarted process must not meet what its predecessor left in a store that outlives both.
        named = PrefixStore(f"reconv/{place.restart}", store)
        dist.init_process_group(
            BACKENDS[device], store=named, rank=place.rank, world_size=place.size, timeout=_PATIENCE
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        is_taken = "EADDRINUSE" in str(error)
        raise UsageError(
            f"the {place.size} processes did not meet",
            where=f"rank {place.rank} of {place.size}, rank 0 at {place.address}:{place.port}",
            why="another program has the port" if is_taken else str(error).splitlines()[0],
            then="set another MASTER_PORT, the same for all processes"
            if is_taken
            else "see that MASTER_ADDR and MASTER_PORT are the same everywhere and that the port is open",
        ) from error
    torch_device = torch.device(device if device == "cpu" else f"{device}:{place.local_rank}")
    winding_down = _WindingDown(place)
    heartbeat = Heartbeat(place, winding_down, served=store)
    return DistributedProcessGroup(place, device=torch_device, heartbeat=heartbeat, winding_down=winding_down)
