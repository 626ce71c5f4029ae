"""Several processes as one process_group, over torch.distributed; loaded only when there are several.

Owns joining, leaving and what processes tell each other. Refuses to know steps and run folders. Invariant: every call
is made by all processes in the same order, and each returns the same on all of them.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.device import load_backend
from reconv.distributed.ddp import DDPStrategy
from reconv.distributed.environment import LaunchEnv
from reconv.distributed.failure import leave_words
from reconv.distributed.heartbeat import Heartbeat
from reconv.distributed.ordered_reduce import OrderedReduceStrategy
from reconv.distributed.process_group import Outcome, ProcessGroup
from reconv.distributed.strategy import Number, ParallelStrategy, StrategyConfig
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
class _PendingMax:
    """Numbers that are reduced while the next step runs."""

    numbers: Tensor
    work: dist.Work


@dataclass(slots=True)
class _WindingDown:
    """What is said and done, in a thread, when another process is lost while the main thread waits for it."""

    launch_env: LaunchEnv
    wind_down: Callable[[ReconvError], None] = lambda error: None

    def __call__(self, error: ReconvError) -> None:
        if self.launch_env.failure_dir:
            leave_words(Path(self.launch_env.failure_dir), self.launch_env.rank, error)
        elif not error.is_reported:
            print(f"error: {error}", file=sys.stderr, flush=True)
        self.wind_down(error)


@dataclass(frozen=True, slots=True)
class DistributedProcessGroup(ProcessGroup):
    """One of several processes."""

    device: torch.device = field(kw_only=True)
    heartbeat: Heartbeat = field(kw_only=True)
    winding_down: _WindingDown = field(kw_only=True)
    _pending: list[_PendingMax] = field(default_factory=list)

    def all_reduce(self, value: Number) -> Number:
        """The sum over all ranks; a number becomes a tensor where reading it back would synchronize the device."""
        if isinstance(value, Tensor):
            total = value.detach().clone()
            dist.all_reduce(total)
            return cast(Number, total)
        if self.device.type == "cpu":
            total = torch.tensor(value, dtype=torch.float64)
            dist.all_reduce(total)
            return cast(Number, type(value)(total.item()))
        total = torch.tensor(value, dtype=torch.float32, device=self.device)
        dist.all_reduce(total)
        return cast(Number, total)

    def all_reduce_max(self, numbers: Sequence[int]) -> tuple[int, ...]:
        """The maximum of each number over all ranks at the previous call; zeros the first time.

        One call late, so that no rank waits: the numbers are reduced while a step runs.
        """
        sent = torch.tensor(numbers, dtype=torch.int64)
        work = dist.all_reduce(sent, dist.ReduceOp.MAX, async_op=True)
        assert work is not None
        self._pending.append(_PendingMax(sent, work))
        if len(self._pending) == 1:
            return (0,) * len(numbers)
        previous = self._pending.pop(0)
        previous.work.wait()
        return tuple(previous.numbers.tolist())

    def all_gather(self, item: T) -> list[T]:
        items: list[T | None] = [None] * self.world_size
        dist.all_gather_object(items, item)
        return cast(list[T], items)

    def on_rank0(self, function: Callable[[], T]) -> T:
        result: list[T | RemoteRankError | None] = [None]
        if self.is_rank0:
            try:
                result = [function()]
            except ReconvError as error:
                dist.broadcast_object_list([RemoteRankError.of(error, is_reported=True)])
                raise
        dist.broadcast_object_list(result)
        if isinstance(result[0], RemoteRankError):
            raise result[0]
        return cast(T, result[0])

    def parallelize(self, model: nn.Module, config: StrategyConfig) -> ParallelStrategy:
        if config.pipeline is not None:
            from reconv.distributed.pipeline import PipelineStrategy  # its import of torch's pipelining is slow

            return PipelineStrategy(self, model, config.pipeline)
        return (OrderedReduceStrategy if config.ordered else DDPStrategy)(self, model, config)

    def set_phase(self, phase: str) -> None:
        self.heartbeat.phase = phase

    def diagnose(self, error: BaseException) -> ReconvError | None:
        text = str(error)
        is_collective = isinstance(error, dist.DistError) or any(word in text for word in ("gloo", "NCCL", "HCCL"))
        return self.heartbeat.judge() if is_collective and isinstance(error, RuntimeError) else None

    def report_failure(self, error: ReconvError) -> bool:
        return self.heartbeat.post(error)

    def on_lost_rank(self, lost_after_s: float, callback: Callable[[ReconvError], None]) -> None:
        self.heartbeat.lost_after_s = lost_after_s
        self.winding_down.wind_down = callback

    def close(self, outcome: Outcome = "finished") -> None:
        """Leave the other ranks; with an error to report they notice at once, and all exit together afterwards."""
        self._pending.clear()
        if outcome == "finished":
            self.heartbeat.leave()
        else:
            self.heartbeat.rest()
            _at_exit.append(Finalize(None, self.heartbeat.leave_together, [outcome == "failed"], exitpriority=0))
        if dist.is_initialized():
            dist.destroy_process_group()


def join(launch_env: LaunchEnv, device: str) -> DistributedProcessGroup:
    """Meet the other processes, or say who could not be met and where."""
    if device not in BACKENDS:
        raise UsageError(
            f"several processes cannot train on {device}", then="use --device cpu or cuda, or a single process"
        )
    load_backend(device)
    while _at_exit:
        _at_exit.pop()()  # a process_group that this process was in before may hold the port
    if launch_env.num_nodes == 1 and sys.platform == "linux":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    serves = launch_env.rank == 0 and not launch_env.uses_agent_store
    try:
        store = TCPStore(
            launch_env.master_addr,
            launch_env.master_port,
            launch_env.world_size,
            is_master=serves,
            timeout=_MEETING,
            wait_for_workers=False,
        )
        # A restarted process must not meet what its predecessor left in a store that outlives both.
        named = PrefixStore(f"reconv/{launch_env.restart_count}", store)
        dist.init_process_group(
            BACKENDS[device], store=named, rank=launch_env.rank, world_size=launch_env.world_size, timeout=_PATIENCE
        )
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        is_taken = "EADDRINUSE" in str(error)
        address = f"{launch_env.master_addr}:{launch_env.master_port}"
        raise UsageError(
            f"the {launch_env.world_size} processes could not connect to each other",
            where=f"rank {launch_env.rank} of {launch_env.world_size}, rank 0 at {address}",
            why="another program uses the port" if is_taken else str(error).splitlines()[0],
            then="set another MASTER_PORT, the same for all processes"
            if is_taken
            else "check that MASTER_ADDR and MASTER_PORT are the same everywhere and that the port is open",
        ) from error
    torch_device = torch.device(device if device == "cpu" else f"{device}:{launch_env.local_rank}")
    winding_down = _WindingDown(launch_env)
    heartbeat = Heartbeat(launch_env, winding_down, served=store)
    return DistributedProcessGroup(launch_env, device=torch_device, heartbeat=heartbeat, winding_down=winding_down)
