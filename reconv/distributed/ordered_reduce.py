"""Data parallelism that adds gradients in group order, so that any number of ranks gives the bits of one process.

Each group is a forward and backward pass of its own, and gradients are added in group order, from rank to rank
(tests/laws/test_law_ranks.py).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn

from reconv.distributed.ddp import DataParallelStrategy, flatten, unflatten
from reconv.distributed.strategy import GradientTraffic, GroupStats, StrategyConfig, ordered_sum
from reconv.precision.policy import to_accumulate_dtype

if TYPE_CHECKING:
    from reconv.distributed.torch_group import DistributedProcessGroup


class OrderedReduceStrategy(DataParallelStrategy):
    """The strategy that adds the gradients of single groups in group order, from rank to rank.

    Rank 0 accumulates its groups as a single process does. Each next rank keeps the gradients of its groups apart,
    adds them in order to the sum it receives, and sends that on; the last rank broadcasts the result.
    """

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, config: StrategyConfig) -> None:
        super().__init__(process_group, model, config)
        self._pass_grads: list[list[Tensor]] = []  # of each pass: its gradients, one flat tensor per dtype

    @contextmanager
    def no_sync(self, enabled: bool) -> Iterator[None]:
        """Keep the gradients of this pass apart."""
        yield
        if self.rank > 0:
            self._pass_grads.append(flatten(self._grads()))
            for parameter in self._parameters if enabled else ():
                parameter.grad = None

    def keeps_passes_apart(self, rank: int) -> bool:
        return rank > 0

    def _grads(self) -> list[Tensor]:
        return [p.grad for p in self._parameters if p.grad is not None]

    def reduce_gradients(self) -> None:
        grads = self._grads()
        self._record(grads if self.rank == 0 else [part for parts in self._pass_grads for part in parts])
        if self.rank == 0:
            sums = flatten(grads)
        else:
            sums = [torch.empty_like(part) for part in self._pass_grads[0]]
            for part in sums:
                dist.recv(part, self.rank - 1)
            for pass_grads in self._pass_grads:
                torch._foreach_add_(sums, pass_grads)
            self._pass_grads = []
        if self.rank < self.world_size - 1:
            for part in sums:
                dist.send(part, self.rank + 1)
        for part in sums:
            dist.broadcast(part, self.world_size - 1)
        unflatten(sums, grads)

    def gradient_traffic(self) -> GradientTraffic:
        parts = flatten(self._grads())

        def repeat() -> None:
            self._pass_grads = [parts] * self._config.num_passes[self.rank] if self.rank > 0 else []
            self.reduce_gradients()

        return GradientTraffic(sum(part.nbytes for part in parts), len(parts), repeat)

    def sum_metrics(self, passes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        own = torch.stack(
            [torch.stack([to_accumulate_dtype(value) for value in metrics.values()]) for metrics in passes]
        )
        rows = self._gather_rows(own)
        return {
            name: ordered_sum([row[column].to(value.dtype) for row in rows])
            for column, (name, value) in enumerate(passes[0].items())
        }

    def gather_stats(self, groups: GroupStats) -> GroupStats:
        own = torch.stack([torch.cat([stats.new_tensor([float(size)]), stats]) for size, stats in groups])
        rows = self._gather_rows(own)
        sizes = torch.stack([row[0] for row in rows]).tolist()  # one device-to-host copy for all
        return [(int(size), row[1:]) for row, size in zip(rows, sizes, strict=True)]

    def _gather_rows(self, rows: Tensor) -> list[Tensor]:
        """The rows of all ranks, one for each pass, in rank order."""
        longest = max(self._config.num_passes)
        padded = torch.cat([rows, rows.new_zeros(longest - len(rows), rows.shape[1])])
        gathered = [torch.empty_like(padded) for _ in range(self.world_size)]
        dist.all_gather(gathered, padded)
        counted = zip(gathered, self._config.num_passes, strict=True)
        return [row for table, num_passes in counted for row in table[:num_passes].unbind()]
