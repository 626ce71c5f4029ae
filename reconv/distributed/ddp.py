"""Data parallelism by torch's DistributedDataParallel, and what every data-parallel strategy shares.

Gradients are summed, never averaged: the task's loss is a sum that was divided by the weight of the global batch. N
ranks agree with one to 1e-12 in float64 after ten steps (tests/laws/test_law_ranks.py).
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from reconv.distributed.strategy import (
    GradientTraffic,
    GroupStats,
    Number,
    ParallelStrategy,
    StrategyConfig,
    ordered_sum,
)
from reconv.precision.policy import to_accumulate_dtype

if TYPE_CHECKING:
    from reconv.distributed.torch_group import DistributedProcessGroup


class DataParallelStrategy(ParallelStrategy):
    """Base of the strategies in which every rank has the whole model and its own samples."""

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, config: StrategyConfig) -> None:
        self._process_group = process_group
        self._config = config
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self.rank, self.world_size = process_group.rank, process_group.world_size
        self._norm_group = _norm_group(process_group.rank, process_group.world_size, config.ranks_per_group)

    def parameters(self) -> list[nn.Parameter]:
        return self._parameters

    def all_reduce(self, value: Number) -> Number:
        return self._process_group.all_reduce(value)

    def group_all_reduce(self, value: Tensor) -> Tensor:
        summed: Tensor = _AllReduce.apply(value, self._norm_group)  # type: ignore[no-untyped-call]
        return summed


class DDPStrategy(DataParallelStrategy):
    """Torch's DDP: buckets of gradients are reduced while earlier layers still compute theirs.

    Only the last pass of a step reduces. Sums are added in whatever order is fastest, and not divided.
    """

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, config: StrategyConfig) -> None:
        super().__init__(process_group, model, config)
        self._model = model
        self._ddp: DistributedDataParallel | None = None
        self._has_reduced = False  # in a step before this one
        self._reduce = _all_reduce_bf16 if config.compress == "bf16" else _all_reduce
        self._buckets: list[tuple[int, torch.dtype]] = []  # of the last step: number of elements, dtype
        self._device = process_group.device

    def wrap(self, forward: Callable[..., object]) -> Callable[..., object]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch renamed DDP; older versions lack the new name
            self._ddp = DistributedDataParallel(
                _ForwardOf(self._model, forward),
                broadcast_buffers=False,  # running statistics are updated from those of all ranks instead
                bucket_cap_mb=self._config.bucket_bytes / 2**20,
            )
        strategy = weakref.proxy(self)  # DDP keeps the hook where the garbage collector does not see it
        self._ddp.register_comm_hook(None, lambda state, bucket: strategy._reduce_bucket(bucket))
        return self._ddp

    def unwrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        return forward.module if isinstance(forward, DistributedDataParallel) else forward

    @property
    def repeats_bits(self) -> bool:
        """After its first step torch makes other buckets, and the sum of three ranks depends on the bucket."""
        return self.world_size <= 2 or self._has_reduced

    def _reduce_bucket(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Reduce one bucket, and note its size: torch rebuilds its buckets after the first step."""
        if bucket.index() == 0:
            self._has_reduced = len(self._buckets) > 0
            self._buckets = []
        buffer = bucket.buffer()
        self._buckets.append((buffer.numel(), buffer.dtype))
        self._record([buffer])
        return self._reduce(buffer)

    def gradient_traffic(self) -> GradientTraffic:
        buffers = [torch.zeros(numel, dtype=dtype, device=self._device) for numel, dtype in self._buckets]
        is_compressed = self._config.compress == "bf16"
        sizes = [torch.bfloat16.itemsize if is_compressed else buffer.itemsize for buffer in buffers]

        def repeat() -> None:
            for future in [self._reduce(buffer) for buffer in buffers]:
                future.wait()

        num_bytes = sum(b.numel() * size for b, size in zip(buffers, sizes, strict=True))
        return GradientTraffic(num_bytes, len(buffers), repeat)

    def no_sync(self, enabled: bool) -> AbstractContextManager[None]:
        return self._ddp.no_sync() if enabled and self._ddp is not None else nullcontext()

    def sum_metrics(self, passes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        own = super().sum_metrics(passes)
        packed = torch.stack([to_accumulate_dtype(value) for value in own.values()])
        dist.all_reduce(packed)
        return {name: total.to(own[name].dtype) for name, total in zip(own, packed.unbind(), strict=True)}

    def gather_stats(self, groups: GroupStats) -> GroupStats:
        return mean_stats(groups)


class _ForwardOf(nn.Module):
    """A model whose forward pass is the given function, which may be compiled."""

    def __init__(self, model: nn.Module, forward: Callable[..., object]) -> None:
        super().__init__()
        self.model = model
        self._forward = [forward]  # in a list: a module would be registered a second time

    def forward(self, *inputs: Any) -> Any:
        return self._forward[0](*inputs)


def mean_stats(groups: GroupStats, process_group: dist.ProcessGroup | None = None) -> GroupStats:
    """The sample-weighted mean over all groups of all ranks, as one group."""
    sums = ordered_sum([stats * num_samples for num_samples, stats in groups])
    packed = torch.cat([sums, sums.new_full((1,), sum(num_samples for num_samples, _ in groups))])
    dist.all_reduce(packed, group=process_group)
    return [(1, packed[:-1] / packed[-1])]


def _all_reduce(buffer: Tensor) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: _only(done.value()))


def _all_reduce_bf16(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Reduce as bfloat16, in half the bytes. Torch's own hook divides first, and does not work with gloo."""
    work = dist.all_reduce(buffer.to(torch.bfloat16), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: buffer.copy_(_only(done.value())))


def _only(value: Any) -> Tensor:
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


def flatten(tensors: Sequence[Tensor]) -> list[Tensor]:
    """One flat tensor for each dtype, with all tensors of that dtype in order."""
    dtypes = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype]) for dtype in dtypes]


def unflatten(flat: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Copy flat tensors back into the tensors that `flatten` was given."""
    for part in flat:
        targets = [t for t in tensors if t.dtype == part.dtype]
        for target, piece in zip(targets, part.split([t.numel() for t in targets]), strict=True):
            target.copy_(piece.view(target.shape))


class _AllReduce(torch.autograd.Function):
    """A sum over ranks whose gradient is the sum of their gradients."""

    @staticmethod
    def forward(ctx: Any, value: Tensor, group: dist.ProcessGroup | None) -> Tensor:
        ctx.group = group
        total = value.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        total = gradient.contiguous().clone()
        dist.all_reduce(total, group=ctx.group)
        return total, None


def _norm_group(rank: int, world_size: int, ranks_per_group: int) -> dist.ProcessGroup | None:
    """The ranks that hold parts of this rank's batch-norm group; None if that is all ranks, or this one alone."""
    if ranks_per_group in (1, world_size):
        return None
    own: dist.ProcessGroup | None = None
    for first in range(0, world_size, ranks_per_group):  # new_group must be called by all ranks for every group
        members = list(range(first, first + ranks_per_group))
        group = dist.new_group(members)
        own = group if rank in members else own
    return own
