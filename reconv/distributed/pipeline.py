"""A network whose parts are on several devices: micro-batches go through them one after the other.

Owns the parts, torch's schedules over them and what the processes of a pipeline tell each other. Refuses to know tasks:
whoever trains says what a micro-batch is and what its loss is. Invariant: after a step every process has the gradients
and the statistics of the whole network, so that optimizer, averages, evaluation and checkpoints are those of data
parallelism.

Process r is part r mod p of copy r div p of the network, p being the devices of a pipeline.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe

from reconv.distributed.gradients import flat, unflatten
from reconv.distributed.process_group import Cut, Shared, Statistics, Summable, fold
from reconv.precision.accumulate import wide

if TYPE_CHECKING:
    from reconv.distributed.ranks import DistributedProcessGroup

Schedule = ScheduleGPipe | Schedule1F1B


class Pipeline(Shared):
    """The step of one process of a pipeline."""

    is_piped = True

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, cut: Cut) -> None:
        self.rank, self.size = process_group.rank, process_group.size
        self._model, self._cut = model, cut
        self._num_parts = len(cut.parts(model))
        self._part = process_group.rank % self._num_parts
        self._device = process_group.device
        self._peers, self._copies = self._groups()
        self._layer = _Part(cut.parts(model)[self._part])
        self._schedule: Schedule | None = None
        self._names: list[tuple[str, torch.dtype]] | None = None  # of what a loss tells, known where it is computed

    @property
    def is_last(self) -> bool:
        """Whether this process computes losses."""
        return self._part == self._num_parts - 1

    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The processes of this pipeline, and those that have this part in others."""
        size, each = self.size, self._num_parts
        peers = [dist.new_group(list(range(first, first + each))) for first in range(0, size, each)]
        copies = [dist.new_group(list(range(part, size, each))) for part in range(each)]
        mine = peers[self.rank // each], copies[self._part]
        return cast(tuple[dist.ProcessGroup, dist.ProcessGroup], mine)  # torch gives strangers something else

    def piped(
        self,
        images: Sequence[Tensor],
        enter: Callable[[int], None],
        loss: Callable[[Any, int], Tensor],
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """The forward and backward passes of all micro-batches; `loss` is asked in the last part."""
        self._layer.begin(enter, loss if self.is_last else None, autocast)
        if self._schedule is None:
            self._schedule = self._build(images, autocast)
        at_once = 1 if self._cut.schedule == "sequential" else len(images)
        for first in range(0, len(images), at_once):
            given = (torch.cat(list(images[first : first + at_once])),) if self._part == 0 else ()
            # Torch wants a target for each loss; ours know their micro-batch.
            targets = torch.zeros(at_once) if self.is_last else None
            self._schedule.step(*given, target=targets, losses=[] if self.is_last else None)

    def _build(self, images: Sequence[Tensor], autocast: Callable[[], AbstractContextManager[None]]) -> Schedule:
        """Torch's schedule; it is told all shapes, since it would find them by a pass that moves statistics."""
        inputs, outputs = self._shapes(images[0], autocast)
        stage = PipelineStage(
            self._layer,
            self._part,
            self._num_parts,
            self._device,
            input_args=inputs,
            output_args=outputs,
            group=self._peers,
        )
        make = Schedule1F1B if self._cut.schedule == "interleaved" else ScheduleGPipe
        num_at_once = 1 if self._cut.schedule == "sequential" else len(images)
        return make(stage, num_at_once, loss_fn=lambda output, target: output.sum(), scale_grads=False)

    def _shapes(
        self, images: Tensor, autocast: Callable[[], AbstractContextManager[None]]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Examples of what goes into this part and comes out of it, from a copy of the network."""
        values: list[tuple[Tensor, ...]] = [(images,)]
        with torch.no_grad(), autocast():
            for part in self._cut.parts(copy.deepcopy(self._model)):
                values.append(_as_tuple(_folded(part, values[-1])))
        examples = [tuple(torch.empty_like(t).requires_grad_() for t in value) for value in values[1:-1]]
        around = [(torch.empty_like(images),), *examples, (torch.empty(1, device=images.device).requires_grad_(),)]
        return around[self._part], around[self._part + 1]

    def sum(self, value: Summable) -> Summable:
        """The sum over the copies of the network: the processes of a pipeline have the same samples."""
        total = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._copies)
        return cast(Summable, total if isinstance(value, Tensor) else type(value)(total.item()))

    def totals(self, rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Of each name the sum over all passes; only last parts have rows."""
        if self._names is None:
            told: list[Any] = [[(name, value.dtype) for name, value in rows[0].items()] if rows else None]
            dist.broadcast_object_list(told, src=self._num_parts - 1)
            self._names = told[0]
        own = [wide(fold([row[name] for row in rows])) if rows else self._zero() for name, _ in self._names]
        packed = torch.stack(own)
        dist.all_reduce(packed)
        return {name: total.to(dtype) for (name, dtype), total in zip(self._names, packed.unbind(), strict=True)}

    def _zero(self) -> Tensor:
        return wide(torch.zeros((), device=self._device))

    def reduce_gradients(self) -> None:
        """Give every process the gradients of all parts, summed over the copies."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        sums = flat(grads)
        for part in sums:
            dist.all_reduce(part)
        unflatten(sums, grads)

    def statistics(self, groups: Statistics) -> Statistics:
        """The groups of this part in all copies of the network."""
        if self.size == self._num_parts:
            return groups
        sums = fold([statistics * num_samples for num_samples, statistics in groups])
        packed = torch.cat([sums, sums.new_tensor([float(sum(num_samples for num_samples, _ in groups))])])
        dist.all_reduce(packed, group=self._copies)
        return [(1, packed[:-1] / packed[-1])]

    def settle(self) -> None:
        """Give every process the running statistics of all parts."""
        for rank, part in enumerate(self._cut.parts(self._model)):
            buffers = [buffer for _, stage in part for buffer in stage.buffers()]
            sent = flat(buffers) if buffers else []
            for tensor in sent:
                dist.broadcast(tensor, rank)
            unflatten(sent, buffers)


class _Part(nn.Module):
    """The stages of one process; each call is the next micro-batch."""

    def __init__(self, stages: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.modules_of_stages = nn.ModuleList([stage for _, stage in stages])
        self._stages = stages

    def begin(
        self,
        enter: Callable[[int], None],
        loss: Callable[[Any, int], Tensor] | None,
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """A step begins."""
        self._enter, self._loss, self._autocast = enter, loss, autocast
        self._next = 0

    def forward(self, *values: Tensor) -> Any:
        number, self._next = self._next, self._next + 1
        self._enter(number)
        with self._autocast():
            output = _folded(self._stages, values)
        return _as_tuple(output) if self._loss is None else self._loss(output, number).reshape(1)


def _folded(stages: Sequence[tuple[str, nn.Module]], values: tuple[Tensor, ...]) -> Any:
    value: Any = values[0] if len(values) == 1 else values
    for _, stage in stages:
        value = stage(value)
    return value


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)
