"""Gradients of several processes become one: in the order of the groups, or as fast as it goes.

Owns what travels in a step. Refuses to know losses and optimizers. Invariant: after `reduce_gradients` every process
has the sum over all groups of the step, none divided by anything; all processes have the same bits.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from reconv.distributed.process_group import Reduction, Shared, Sharing, Statistics, Summable, fold
from reconv.precision.accumulate import wide

if TYPE_CHECKING:
    from reconv.distributed.ranks import DistributedProcessGroup


class _Together(Shared):
    """What both ways share."""

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, sharing: Sharing) -> None:
        self._world = process_group
        self._sharing = sharing
        self.rank, self.size = process_group.rank, process_group.size
        self._holders = _holders(process_group.rank, process_group.size, sharing.ranks_per_group)

    def sum(self, value: Summable) -> Summable:
        """The sum over all processes."""
        return self._world.sum(value)

    def spread(self, value: Tensor) -> Tensor:
        """The sum over the processes that hold parts of one group, through which gradients flow."""
        summed: Tensor = _Sum.apply(value, self._holders)  # type: ignore[no-untyped-call]
        return summed


class OverlappedReduce(_Together):
    """Torch's own data parallelism: buckets of gradients travel while earlier layers are still differentiated.

    They travel in the last pass of a step alone. Sums are added in whatever order is fastest.
    """

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, sharing: Sharing) -> None:
        super().__init__(process_group, model, sharing)
        self._model = model
        self._parallel: DistributedDataParallel | None = None
        self._add = _add_bf16 if sharing.compress == "bf16" else _add
        self._buckets: list[tuple[int, torch.dtype]] = []  # of the last step: how many numbers of which type
        self._device = process_group.device

    def wrap(self, forward: Callable[..., object]) -> Callable[..., object]:
        """The forward pass, watched by torch's reducer."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # newer torch has another name for it, older ones have not
            self._parallel = DistributedDataParallel(
                _Called(self._model, forward),
                broadcast_buffers=False,  # ours move by statistics of all groups
                bucket_cap_mb=self._sharing.bucket_bytes / 2**20,
            )
        self._parallel.register_comm_hook(None, lambda state, bucket: self._travel(bucket))
        return self._parallel

    def _travel(self, bucket: GradBucket) -> torch.futures.Future[Tensor]:
        """Add one bucket, and note its size: torch fills its buckets anew after the first step."""
        if bucket.index() == 0:
            self._buckets = []
        buffer = bucket.buffer()
        self._buckets.append((buffer.numel(), buffer.dtype))
        return self._add(buffer)

    def reduction(self) -> Reduction:
        """The buckets of the last step, on their way alone."""
        buffers = [torch.zeros(numel, dtype=dtype, device=self._device) for numel, dtype in self._buckets]
        is_halved = self._sharing.compress == "bf16"
        sizes = [torch.bfloat16.itemsize if is_halved else buffer.itemsize for buffer in buffers]

        def again() -> None:
            for future in [self._add(buffer) for buffer in buffers]:
                future.wait()

        return Reduction(sum(b.numel() * size for b, size in zip(buffers, sizes, strict=True)), len(buffers), again)

    def passing(self, is_last: bool) -> AbstractContextManager[None]:
        """Gradients stay here until the last pass."""
        return nullcontext() if is_last or self._parallel is None else self._parallel.no_sync()

    def totals(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of each name the sum over the passes of all processes."""
        own = super().totals(rows)
        packed = torch.stack([wide(value) for value in own.values()])
        dist.all_reduce(packed)
        return {name: total.to(own[name].dtype) for name, total in zip(own, packed.unbind(), strict=True)}

    def statistics(self, groups: Statistics) -> Statistics:
        """One entry that weighs as all groups of all processes do."""
        sums = fold([statistics * num_samples for num_samples, statistics in groups])
        packed = torch.cat([sums, sums.new_tensor([float(sum(num_samples for num_samples, _ in groups))])])
        dist.all_reduce(packed)
        return [(1, packed[:-1] / packed[-1])]


class _Called(nn.Module):
    """A network under the forward pass that stands for it, compiled or not."""

    def __init__(self, network: nn.Module, forward: Callable[..., object]) -> None:
        super().__init__()
        self.network = network
        self._forward = [forward]  # hidden: a module would be registered a second time

    def forward(self, *inputs: Any) -> Any:
        return self._forward[0](*inputs)


def _add(buffer: Tensor) -> torch.futures.Future[Tensor]:
    work = dist.all_reduce(buffer, async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: _only(done.value()))


def _add_bf16(buffer: Tensor) -> torch.futures.Future[Tensor]:
    """Half the bytes: gradients travel and are added as bfloat16. Torch's own hook divides first, and refuses gloo."""
    work = dist.all_reduce(buffer.to(torch.bfloat16), async_op=True)
    assert work is not None
    future: torch.futures.Future[Any] = work.get_future()
    return future.then(lambda done: buffer.copy_(_only(done.value())))


def _only(value: Any) -> Tensor:
    tensor: Tensor = value[0] if isinstance(value, list) else value
    return tensor


class OrderedReduce(_Together):
    """The gradients of single groups are added in group order, from rank to rank: the bits of one process.

    Rank 0 adds its groups as a process alone does. Each next rank keeps its groups apart, adds them to what it is
    handed, in order, and hands that on; the last one tells all.
    """

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, sharing: Sharing) -> None:
        super().__init__(process_group, model, sharing)
        self._parameters = [p for p in model.parameters() if p.requires_grad]
        self._kept: list[list[Tensor]] = []  # of each pass: its gradients in one tensor for each type

    @contextmanager
    def passing(self, is_last: bool) -> Iterator[None]:
        """Keep the gradients of this pass apart."""
        yield
        if self.rank > 0:
            self._kept.append(flat([p.grad for p in self._parameters if p.grad is not None]))
            for parameter in self._parameters if not is_last else ():
                parameter.grad = None

    def reduce_gradients(self) -> None:
        """Take the sum so far, add one's own groups, hand it on, and take what comes of it."""
        grads = [p.grad for p in self._parameters if p.grad is not None]
        if self.rank == 0:
            sums = flat(grads)
        else:
            sums = [torch.empty_like(part) for part in self._kept[0]]
            for part in sums:
                dist.recv(part, self.rank - 1)
            for group in self._kept:
                torch._foreach_add_(sums, group)
            self._kept = []
        if self.rank < self.size - 1:
            for part in sums:
                dist.send(part, self.rank + 1)
        for part in sums:
            dist.broadcast(part, self.size - 1)
        unflatten(sums, grads)

    def reduction(self) -> Reduction:
        """The way of the last step's gradients from rank to rank, which grow by it."""
        parts = flat([p.grad for p in self._parameters if p.grad is not None])

        def again() -> None:
            self._kept = [parts] * self._sharing.passes[self.rank] if self.rank > 0 else []
            self.reduce_gradients()

        return Reduction(sum(part.nbytes for part in parts), len(parts), again)

    def totals(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of each name the sum over the passes of all processes, in order."""
        own = torch.stack([torch.stack([wide(value) for value in row.values()]) for row in rows])
        every = self._gather_rows(own)
        return {
            name: fold([row[column].to(value.dtype) for row in every])
            for column, (name, value) in enumerate(rows[0].items())
        }

    def statistics(self, groups: Statistics) -> Statistics:
        """The groups of all processes, in order."""
        rows = torch.stack([torch.cat([flat.new_tensor([float(size)]), flat]) for size, flat in groups])
        return [(int(size), row[1:]) for row, size in _with_sizes(self._gather_rows(rows))]

    def _gather_rows(self, rows: Tensor) -> list[Tensor]:
        """The rows of all processes, one for each pass."""
        most = max(self._sharing.passes)
        padded = torch.cat([rows, rows.new_zeros(most - len(rows), rows.shape[1])])
        gathered = [torch.empty_like(padded) for _ in range(self.size)]
        dist.all_gather(gathered, padded)
        counted = zip(gathered, self._sharing.passes, strict=True)
        return [row for table, num_passes in counted for row in table[:num_passes].unbind()]


def _with_sizes(rows: Sequence[Tensor]) -> Iterator[tuple[Tensor, float]]:
    """Each row with its first number, read from the device once."""
    sizes = torch.stack([row[0] for row in rows]).tolist()
    return zip(rows, sizes, strict=True)


def flat(tensors: Sequence[Tensor]) -> list[Tensor]:
    """All tensors of a type one after the other in one, type by type."""
    types = dict.fromkeys(tensor.dtype for tensor in tensors)
    return [torch.cat([t.reshape(-1) for t in tensors if t.dtype == dtype]) for dtype in types]


def unflatten(parts: Sequence[Tensor], tensors: Sequence[Tensor]) -> None:
    """Put back what `flat` took."""
    for part in parts:
        of_type = [t for t in tensors if t.dtype == part.dtype]
        for target, piece in zip(of_type, part.split([t.numel() for t in of_type]), strict=True):
            target.copy_(piece.view(target.shape))


class _Sum(torch.autograd.Function):
    """A sum over processes whose gradient is the sum of their gradients."""

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


def _holders(rank: int, size: int, ranks_per_group: int) -> dist.ProcessGroup | None:
    """The processes that hold parts of this one's group; None: all, or nobody else."""
    if ranks_per_group in (1, size):
        return None
    mine: dist.ProcessGroup | None = None
    for first in range(0, size, ranks_per_group):  # every process makes all of them: torch asks for that
        members = list(range(first, first + ranks_per_group))
        made = dist.new_group(members)
        mine = made if rank in members else mine
    return mine
