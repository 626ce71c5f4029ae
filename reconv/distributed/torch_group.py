"""The ranks of a run over torch.distributed; loaded only when there is more than one process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.util import Finalize
from typing import ClassVar, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import PrefixStore, TCPStore

from reconv.core.batch import Batch
from reconv.core.errors import RankLostError, ReconvError, RemoteRankError, UsageError
from reconv.device import count_devices, load_backend
from reconv.distributed import collectives
from reconv.distributed.authentication import authenticate
from reconv.distributed.ddp import DDPStrategy
from reconv.distributed.environment import LaunchEnv, requested_backend
from reconv.distributed.failure import FailureMonitor
from reconv.distributed.liveness import ConnectingRanks, Heartbeat
from reconv.distributed.nic import VARIABLES as NIC_VARIABLES
from reconv.distributed.ordered_reduce import OrderedReduceStrategy
from reconv.distributed.process_group import Outcome, Pace, ProcessGroup
from reconv.distributed.rank_store import Signer, open_store
from reconv.distributed.strategy import Number, ParallelStrategy, StrategyConfig
from reconv.recipe.parts.batch import ParallelConfig

T = TypeVar("T")

BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl", "hpu": "cpu:gloo,hpu:hccl"}
# A lost rank is noticed by its heartbeats; a collective itself may wait for a rank that is compiling.
_COLLECTIVE_TIMEOUT = timedelta(hours=2)
# The exit barriers of process groups that have failed. Not atexit, which does not run in processes that
# multiprocessing has forked.
_exit_barriers: list[Finalize] = []


@dataclass(slots=True)
class _PendingMax:
    """An all-reduce (maximum) that runs during the next step."""

    numbers: Tensor
    work: dist.Work


@dataclass(frozen=True, slots=True)
class DistributedProcessGroup(ProcessGroup):
    """The process group of several ranks, by torch.distributed."""

    device: torch.device = field(kw_only=True)
    monitor: FailureMonitor = field(kw_only=True)
    is_authenticated: bool = field(kw_only=True)
    is_distributed: ClassVar[bool] = True
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
        total = torch.full((), value, dtype=torch.float32, device=self.device)  # a copy could not be captured
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
        return collectives.all_gather(item)

    def exchange_batches(self, batches: Sequence[Batch], shift: int) -> list[Batch]:
        sent = [(dict(batch.tensors), batch.positions, batch.groups) for batch in batches]
        target, source = (self.rank + shift) % self.world_size, (self.rank - shift) % self.world_size
        received = collectives.exchange(sent, target, source)
        return [Batch(tensors, positions, groups).map(self._move) for tensors, positions, groups in received]

    def _move(self, tensor: Tensor) -> Tensor:
        return tensor.to(self.device)

    def on_rank0(self, function: Callable[[], T]) -> T:
        if self.is_rank0:
            try:
                item = function()
            except ReconvError as error:
                collectives.broadcast(RemoteRankError.of(error, is_reported=True))
                raise
            return collectives.broadcast(item)
        result = collectives.broadcast(cast(T | RemoteRankError | None, None))
        if isinstance(result, RemoteRankError):
            raise result
        return cast(T, result)

    def parallelize(self, model: nn.Module, config: StrategyConfig) -> ParallelStrategy:
        if config.pipeline is not None:
            from reconv.distributed.pipeline import PipelineStrategy  # its import of torch's pipelining is slow

            return PipelineStrategy(self, model, config.pipeline)
        return (OrderedReduceStrategy if config.ordered else DDPStrategy)(self, model, config)

    def set_phase(self, phase: str) -> None:
        self.monitor.set_phase(phase)

    def set_pace(self, pace: Pace) -> None:
        self.monitor.set_pace(pace)

    def paces(self) -> Mapping[int, tuple[str, Pace]]:
        return self.monitor.paces()

    def diagnose(self, error: BaseException) -> ReconvError | None:
        return self.monitor.diagnose() if _is_of_collective(error) else None

    def report_failure(self, error: ReconvError) -> bool:
        return self.monitor.report(error)

    def on_lost_rank(self, heartbeat_timeout_s: float, callback: Callable[[ReconvError], None]) -> None:
        self.monitor.heartbeat_timeout_s = heartbeat_timeout_s
        self.monitor.on_lost_rank = callback

    def close(self, outcome: Outcome = "finished") -> None:
        """Leave the other ranks; with an error to report they notice at once, and all exit together afterwards."""
        self._pending.clear()
        if outcome == "finished":
            self.monitor.finish()
        else:
            self.monitor.stop()
            _exit_barriers.append(Finalize(None, self.monitor.exit_barrier, [outcome == "failed"], exitpriority=0))
        if dist.is_initialized():
            dist.destroy_process_group()


def join(launch_env: LaunchEnv, device: str) -> DistributedProcessGroup:
    """Connect to the other ranks."""
    if device not in BACKENDS:
        raise UsageError(
            f"several processes cannot train on {device}", hint="use --device cpu or cuda, or a single process"
        )
    load_backend(device)
    while _exit_barriers:
        _exit_barriers.pop()()  # an earlier process group of this process may hold the port
    if launch_env.num_nodes == 1 and sys.platform == "linux":
        for variable in NIC_VARIABLES:  # no other machine has a reason to connect
            os.environ.setdefault(variable, "lo")
    store, launch_env = open_store(launch_env)
    try:
        with ConnectingRanks(launch_env) as connecting:
            connecting.wait_for_all()
            secret, is_authenticated = connecting.run(lambda: _init_process_group(launch_env, device, store))
    except RuntimeError as error:
        if not _is_of_collective(error):
            raise
        raise RankLostError(
            f"the {launch_env.world_size} processes could not connect to each other",
            where=f"rank {launch_env.rank} of {launch_env.world_size}",
            why=str(error).splitlines()[0],
            hint="check the network between the machines, and choose its interface with --nic",
        ) from error
    index = launch_env.local_rank % (count_devices(device) or 1)  # a launcher may show each process its own device
    torch_device = torch.device(device if device == "cpu" else f"{device}:{index}")
    default_timeout_s = ParallelConfig().heartbeat_timeout_s  # until the recipe is known
    heartbeat = Heartbeat(launch_env, Signer(secret))
    monitor = FailureMonitor(launch_env, heartbeat, store, default_timeout_s)
    return DistributedProcessGroup(launch_env, device=torch_device, monitor=monitor, is_authenticated=is_authenticated)


def _init_process_group(launch_env: LaunchEnv, device: str, store: TCPStore) -> tuple[str, bool]:
    """Connect to all ranks; returns a secret that they share, and whether they have proved to be of the run."""
    dist.init_process_group(
        "gloo" if requested_backend() == "gloo" else BACKENDS[device],
        # A restarted process must not read what its predecessor left in the agent's store.
        store=PrefixStore(f"reconv/{launch_env.restart_count}", store),
        rank=launch_env.rank,
        world_size=launch_env.world_size,
        timeout=_COLLECTIVE_TIMEOUT,
    )
    try:
        return authenticate(launch_env)
    except ReconvError:
        dist.destroy_process_group()
        raise


def _is_of_collective(error: BaseException) -> bool:
    """True if an error comes from the connections between ranks."""
    is_named = any(word in str(error) for word in ("gloo", "NCCL", "HCCL"))
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and is_named)
