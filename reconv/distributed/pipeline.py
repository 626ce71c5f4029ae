"""Pipeline parallelism: the stages of a model on several devices, and torch's schedules over them.

Rank r holds stage r mod p of replica r div p of the model, where p is the number of stages. After a step every rank has
the gradients and buffers of the whole model, so optimizer, EMA, evaluation and checkpoints are those of data
parallelism.

A pipeline replaces the forward and backward pass of a step and nothing else: bitwise on one replica on the CPU, to
1e-12 in float64 on several (tests/laws/test_law_pipeline.py).
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

from reconv.distributed import collectives
from reconv.distributed.ddp import flatten, mean_stats, unflatten
from reconv.distributed.strategy import GroupStats, Number, ParallelStrategy, PipelineConfig, ordered_sum
from reconv.precision.policy import to_accumulate_dtype

if TYPE_CHECKING:
    from reconv.distributed.torch_group import DistributedProcessGroup

Schedule = ScheduleGPipe | Schedule1F1B
Autocast = Callable[[], AbstractContextManager[None]]


class PipelineStrategy(ParallelStrategy):
    """The strategy of pipeline parallelism: each rank runs one stage of the model."""

    is_pipeline = True

    def __init__(self, process_group: DistributedProcessGroup, model: nn.Module, config: PipelineConfig) -> None:
        self.rank, self.world_size = process_group.rank, process_group.world_size
        self._model, self._config = model, config
        self._num_stages = len(config.split(model))
        self._stage_index = process_group.rank % self._num_stages
        self._device = process_group.device
        self._pipeline_group, self._replica_group = self._groups()
        self._stage = _Stage(config.split(model)[self._stage_index])
        self._schedule: Schedule | None = None
        self._metrics: list[tuple[str, torch.dtype]] | None = None  # known on the last stage, broadcast from there

    @property
    def is_last_stage(self) -> bool:
        """True if this rank computes losses."""
        return self._stage_index == self._num_stages - 1

    def _groups(self) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
        """The ranks of this pipeline, and the ranks that hold this stage in all replicas."""
        size, stages = self.world_size, self._num_stages
        pipelines = [dist.new_group(list(range(first, first + stages))) for first in range(0, size, stages)]
        replicas = [dist.new_group(list(range(stage, size, stages))) for stage in range(stages)]
        own = pipelines[self.rank // stages], replicas[self._stage_index]
        return cast(tuple[dist.ProcessGroup, dist.ProcessGroup], own)  # new_group returns an int to non-members

    def pipeline_step(
        self,
        images: Sequence[Tensor],
        enter: Callable[[int], None],
        loss: Callable[[Any, int], Tensor],
        autocast: Autocast,
    ) -> None:
        self._stage.begin_step(enter, loss if self.is_last_stage else None, autocast)
        in_flight = self._micro_batches_in_flight(images)
        if self._schedule is None:
            self._schedule = self._build_schedule(images[0], in_flight, autocast)
        for first in range(0, len(images), in_flight):
            inputs = (torch.cat(list(images[first : first + in_flight])),) if self._stage_index == 0 else ()
            # Torch requires a target for each loss; our loss function knows its micro-batch instead.
            targets = torch.zeros(in_flight) if self.is_last_stage else None
            self._schedule.step(*inputs, target=targets, losses=[] if self.is_last_stage else None)

    def _micro_batches_in_flight(self, images: Sequence[Tensor]) -> int:
        return 1 if self._config.schedule == "sequential" else len(images)

    def _build_schedule(self, images: Tensor, in_flight: int, autocast: Autocast) -> Schedule:
        """Torch's schedule with all shapes given: it would infer them by a pass that updates running statistics."""
        inputs, outputs = self._shapes(images, autocast)
        stage = PipelineStage(
            self._stage,
            self._stage_index,
            self._num_stages,
            self._device,
            input_args=inputs,
            output_args=outputs,
            group=self._pipeline_group,
        )
        schedule = Schedule1F1B if self._config.schedule == "1f1b" else ScheduleGPipe
        return schedule(stage, in_flight, loss_fn=lambda output, target: output.sum(), scale_grads=False)

    def _shapes(self, images: Tensor, autocast: Autocast) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Example inputs and outputs of this stage, from a copy of the model."""
        values: list[tuple[Tensor, ...]] = [(images,)]
        with torch.no_grad(), autocast():
            for stage in self._config.split(copy.deepcopy(self._model)):
                values.append(_as_tuple(_run_modules(stage, values[-1])))
        between = [tuple(torch.empty_like(t).requires_grad_() for t in value) for value in values[1:-1]]
        loss = (torch.empty(1, device=images.device).requires_grad_(),)
        borders = [(torch.empty_like(images),), *between, loss]
        return borders[self._stage_index], borders[self._stage_index + 1]

    def all_reduce(self, value: Number) -> Number:
        """The sum over the replicas: the stages of one pipeline see the same samples."""
        total = value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(total, group=self._replica_group)
        return cast(Number, total if isinstance(value, Tensor) else type(value)(total.item()))

    def sum_metrics(self, passes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of each metric over all passes, which only the last stages have."""
        if self._metrics is None:
            known = [(name, value.dtype) for name, value in passes[0].items()] if passes else None
            self._metrics = collectives.broadcast(known, source=self._num_stages - 1)
        zero = to_accumulate_dtype(torch.zeros((), device=self._device))
        own = [
            to_accumulate_dtype(ordered_sum([row[name] for row in passes])) if passes else zero
            for name, _ in self._metrics
        ]
        packed = torch.stack(own)
        dist.all_reduce(packed)
        return {name: total.to(dtype) for (name, dtype), total in zip(self._metrics, packed.unbind(), strict=True)}

    def reduce_gradients(self) -> None:
        """Give every rank the gradients of all stages, summed over the replicas."""
        parameters = [p for p in self._model.parameters() if p.requires_grad]
        for parameter in parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        grads = [p.grad for p in parameters if p.grad is not None]
        sums = flatten(grads)
        for part in sums:
            dist.all_reduce(part)
        unflatten(sums, grads)

    def gather_stats(self, groups: GroupStats) -> GroupStats:
        """The batch-norm groups of this stage in all replicas."""
        return groups if self.world_size == self._num_stages else mean_stats(groups, self._replica_group)

    def sync_buffers(self) -> None:
        """Give every rank the running statistics of all stages."""
        for rank, stage in enumerate(self._config.split(self._model)):
            buffers = [buffer for _, module in stage for buffer in module.buffers()]
            flat = flatten(buffers)
            for tensor in flat:
                dist.broadcast(tensor, rank)
            unflatten(flat, buffers)


class _Stage(nn.Module):
    """The modules of one stage; each call is the next micro-batch of a step."""

    def __init__(self, modules: Sequence[tuple[str, nn.Module]]) -> None:
        super().__init__()
        self.stage_modules = nn.ModuleList([module for _, module in modules])
        self._named = modules

    def begin_step(
        self, enter: Callable[[int], None], loss: Callable[[Any, int], Tensor] | None, autocast: Autocast
    ) -> None:
        self._enter, self._loss, self._autocast = enter, loss, autocast
        self._next = 0

    def forward(self, *values: Tensor) -> Any:
        micro_batch, self._next = self._next, self._next + 1
        self._enter(micro_batch)
        with self._autocast():
            output = _run_modules(self._named, values)
        # The schedule backpropagates from the loss, whose gradient is 1, and expects the dtype that it was told.
        return _as_tuple(output) if self._loss is None else self._loss(output, micro_batch).float().reshape(1)


def _run_modules(modules: Sequence[tuple[str, nn.Module]], values: tuple[Tensor, ...]) -> Any:
    value: Any = values[0] if len(values) == 1 else values
    for _, module in modules:
        value = module(value)
    return value


def _as_tuple(value: Any) -> tuple[Tensor, ...]:
    return (value,) if isinstance(value, Tensor) else tuple(value)
