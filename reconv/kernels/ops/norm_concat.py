"""Batch norm and ReLU of the branches of an inception block, which end in one concatenated tensor.

The kernels write each branch into its channels of the concatenation and read its gradient from there, so that nothing
is copied. `batch_norm_relu_split` normalizes the output of the block's narrow convolutions, computed as one, and writes
the first of its three parts into the concatenation; `batch_norm_relu_concat` adds the other three branches. Each
computes its three norms in one launch per pass: most of these tensors are so small that a launch costs more than bytes.

There is no host synchronization and no choice by value, so all of it can be captured in a CUDA graph. Tensors must
satisfy `dispatch.supports`, groups `dispatch.supports_groups`, and all widths must be multiples of 8 channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import ChannelRows, LaunchConfig, channel_rows, counters
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import NormParams, sum_groups, tile_constants
from reconv.kernels.triton import norm_concat as device

CONFIGS = {  # as of `batch_norm`
    "statistics": LaunchConfig(8, 3, 1),
    "normalize": LaunchConfig(),
    "gradient_sums": LaunchConfig(8, 3, 1),
    "gradient": LaunchConfig(),
}


def batch_norm_relu_split(
    x: Tensor, norms: Sequence[NormParams], groups: Sequence[int], num_channels: int, stats: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """relu(norm(part)) of three consecutive ranges of channels of x, and their statistics [groups, 3, channels].

    The first part is returned as the first channels of a tensor of `num_channels` channels. Its other channels are
    memory that `batch_norm_relu_concat` writes; their gradient is ignored.
    """
    output: tuple[Tensor, Tensor, Tensor, Tensor] = _BatchNormReluSplit.apply(  # type: ignore[no-untyped-call]
        x, stats, tuple(norms), tuple(groups), num_channels, *_parameters(norms)
    )
    return output


def batch_norm_relu_concat(
    y: Tensor, inputs: Sequence[Tensor], norms: Sequence[NormParams], groups: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Write relu(norm(x)) of three inputs into the last channels of y, in place; returns y, and their statistics.

    The gradient of y is passed on with the channels written here, which whoever wrote the first ones must ignore.
    """
    output: tuple[Tensor, Tensor] = _BatchNormReluConcat.apply(  # type: ignore[no-untyped-call]
        y, *inputs, tuple(norms), tuple(groups), *_parameters(norms)
    )
    return output


def _parameters(norms: Sequence[NormParams]) -> list[Tensor]:
    return [norm.weight for norm in norms] + [norm.bias for norm in norms]


@dataclass(frozen=True, slots=True)
class PartRows(ChannelRows):
    """Rows of several parts, whose blocks of channels do not cross the end of a part."""

    widths: tuple[int, ...]

    def _used(self, block: int) -> float:
        return self.channels / (self._num_blocks(block) * block)

    def _num_blocks(self, block: int) -> int:
        return sum(-(-width // block) for width in self.widths)

    @property
    def num_blocks(self) -> int:
        """Tiles along the channels of all parts."""
        return self._num_blocks(self.block)


def part_rows(x: Tensor, groups: Sequence[int], widths: Sequence[int]) -> PartRows:
    """The rows of parts that have the samples and pixels of x."""
    rows = channel_rows(x, groups)
    return PartRows(
        rows.num_rows, sum(widths), rows.group_rows, rows.num_groups, rows.num_sms, rows.shared_bytes, tuple(widths)
    )


@dataclass(frozen=True, slots=True)
class Columns:
    """Three tensors, or ranges of channels of tensors: one per part, with the channels between two of their rows."""

    parts: tuple[Tensor, ...]
    strides: tuple[int, ...]

    @classmethod
    def of_tensors(cls, tensors: Sequence[Tensor]) -> Columns:
        """All channels of three tensors."""
        return cls(tuple(tensors), tuple(tensor.shape[1] for tensor in tensors))

    @classmethod
    def of_range(cls, tensor: Tensor, widths: Sequence[int], first: int = 0) -> Columns:
        """Consecutive channels of one tensor, from `first` on."""
        starts = accumulate(widths[:-1], initial=first)
        parts = tuple(tensor.narrow(1, start, width) for start, width in zip(starts, widths, strict=True))
        return cls(parts, (tensor.shape[1],) * len(widths))

    @classmethod
    def of_first(cls, tensor: Tensor, others: Sequence[Tensor], width: int) -> Columns:
        """The first channels of one tensor, and all of the others."""
        return cls((tensor.narrow(1, 0, width), *others), tuple(t.shape[1] for t in (tensor, *others)))


@dataclass(frozen=True, slots=True)
class PartNorms:
    """Three inputs and their normalization; stats [groups, 3, channels of all parts]."""

    x: Columns
    stats: Tensor
    weights: tuple[Tensor, ...]
    biases: tuple[Tensor, ...]

    def tensors(self) -> tuple[Tensor, ...]:
        """All tensors, in the order of the kernels' arguments."""
        return *self.x.parts, self.stats, *self.weights, *self.biases


class _BatchNormReluSplit(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        stats: Tensor | None,
        norms: tuple[NormParams, ...],
        groups: tuple[int, ...],
        num_channels: int,
        *parameters: Tensor,
    ) -> tuple[Tensor, ...]:
        x = _channels_last(x)
        rows = part_rows(x, groups, [len(norm.weight) for norm in norms])
        columns = Columns.of_range(x, rows.widths)
        stats = statistics(columns, norms, rows) if stats is None else stats
        operand = PartNorms(columns, stats, parameters[:3], parameters[3:])
        outputs = [_empty(x, width) for width in (num_channels, *rows.widths[1:])]
        write_output(operand, Columns.of_first(outputs[0], outputs[1:], rows.widths[0]), rows)
        ctx.save_for_backward(x, stats, *parameters)
        ctx.rows = rows
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return *outputs, stats

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # the last one, of stats, is None
        x, stats, *parameters = ctx.saved_tensors
        rows: PartRows = ctx.rows
        operand = PartNorms(Columns.of_range(x, rows.widths), stats, tuple(parameters[:3]), tuple(parameters[3:]))
        first, *others = (_channels_last(dy) for dy in gradients[:3])
        dy = Columns.of_first(first, others, rows.widths[0])
        sums = gradient_sums(dy, operand, rows)
        dx = torch.empty_like(x)
        write_input_gradients(dy, operand, sums, Columns.of_range(dx, rows.widths), rows)
        return dx, None, None, None, None, *_parameter_gradients(sums, parameters, rows)


class _BatchNormReluConcat(Function):
    @staticmethod
    def forward(
        ctx: Any,
        y: Tensor,
        x0: Tensor,
        x1: Tensor,
        x2: Tensor,
        norms: tuple[NormParams, ...],
        groups: tuple[int, ...],
        *parameters: Tensor,
    ) -> tuple[Tensor, Tensor]:
        inputs = tuple(_channels_last(x) for x in (x0, x1, x2))
        rows = part_rows(y, groups, [x.shape[1] for x in inputs])
        columns = Columns.of_tensors(inputs)
        operand = PartNorms(columns, statistics(columns, norms, rows), parameters[:3], parameters[3:])
        write_output(operand, Columns.of_range(y, rows.widths, y.shape[1] - rows.channels), rows)
        ctx.mark_dirty(y)
        ctx.save_for_backward(*inputs, operand.stats, *parameters)
        ctx.rows = rows
        ctx.mark_non_differentiable(operand.stats)
        ctx.set_materialize_grads(False)
        return y, operand.stats

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x0, x1, x2, stats, *parameters = ctx.saved_tensors
        inputs = (x0, x1, x2)
        rows: PartRows = ctx.rows
        operand = PartNorms(Columns.of_tensors(inputs), stats, tuple(parameters[:3]), tuple(parameters[3:]))
        gradient = _channels_last(gradient)
        dy = Columns.of_range(gradient, rows.widths, gradient.shape[1] - rows.channels)
        sums = gradient_sums(dy, operand, rows)
        dx = [torch.empty_like(x) for x in inputs]
        write_input_gradients(dy, operand, sums, Columns.of_tensors(dx), rows)
        return gradient, *dx, None, None, *_parameter_gradients(sums, parameters, rows)


def _empty(x: Tensor, channels: int) -> Tensor:
    """Memory for a channels_last tensor with the samples and pixels of x."""
    shape = (x.shape[0], channels, *x.shape[2:])
    return torch.empty(shape, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)


def _channels_last(x: Tensor) -> Tensor:
    return x.contiguous(memory_format=torch.channels_last)


def _parameter_gradients(sums: Tensor, parameters: Sequence[Tensor], rows: PartRows) -> list[Tensor]:
    """The gradients of the weights, then of the biases."""
    parts = (*sums[1].split(rows.widths, 1), *sums[0].split(rows.widths, 1))
    return [sum_groups(part, parameter) for part, parameter in zip(parts, parameters, strict=True)]


def _counts(rows: PartRows, *columns: Columns) -> tuple[int, ...]:
    """Widths, strides and rows, as the kernels take them."""
    sizes = (*rows.widths, *(stride for column in columns for stride in column.strides))
    return *(size // 8 for size in sizes), rows.num_rows, rows.group_rows


def statistics(x: Columns, norms: Sequence[NormParams], rows: PartRows) -> Tensor:
    """Mean, unbiased variance and 1 / std [groups, 3, channels of all parts]; all norms have one epsilon."""
    config, on = CONFIGS["statistics"], x.parts[0].device
    stats = torch.empty(rows.num_groups, 3, rows.channels, dtype=torch.float32, device=on)
    partials = torch.empty(rows.num_groups * rows.splits(config) * 2 * rows.channels, dtype=torch.float32, device=on)
    launch(
        device.statistics, rows.grid(config),
        *x.parts, *(norm.running_var for norm in norms), stats, partials, counters(rows.num_counts, on),
        *_counts(rows, x), norms[0].eps, STAGES=rows.stages(config, x.parts[0]), **tile_constants(rows, config),
    )  # fmt: skip
    return stats


def write_output(operand: PartNorms, y: Columns, rows: PartRows) -> None:
    """Write relu(norm(x)) of each part."""
    config = CONFIGS["normalize"]
    launch(
        device.normalize, rows.grid(config),
        *operand.tensors(), *y.parts, *_counts(rows, operand.x, y), STAGES=rows.stages(config, operand.x.parts[0]),
        **tile_constants(rows, config),
    )  # fmt: skip


def gradient_sums(dy: Columns, operand: PartNorms, rows: PartRows) -> Tensor:
    """Sums of dz and dz * xhat [2, groups, channels of all parts], where dz is the gradient before the ReLU."""
    config, on = CONFIGS["gradient_sums"], operand.stats.device
    sums = torch.empty(2, rows.num_groups, rows.channels, dtype=torch.float32, device=on)
    partials = torch.empty(rows.num_groups * rows.splits(config) * 2 * rows.channels, dtype=torch.float32, device=on)
    launch(
        device.gradient_sums, rows.grid(config),
        *dy.parts, *operand.tensors(), sums, partials, counters(rows.num_counts, on), *_counts(rows, operand.x, dy),
        STAGES=rows.stages(config, dy.parts[0], operand.x.parts[0]), **tile_constants(rows, config),
    )  # fmt: skip
    return sums


def write_input_gradients(dy: Columns, operand: PartNorms, sums: Tensor, dx: Columns, rows: PartRows) -> None:
    """Write the gradient of each part's input."""
    config = CONFIGS["gradient"]
    launch(
        device.gradient, rows.grid(config),
        *dy.parts, *operand.tensors(), sums, *dx.parts, *_counts(rows, operand.x, dy),
        STAGES=rows.stages(config, dy.parts[0], operand.x.parts[0]), **tile_constants(rows, config),
    )  # fmt: skip
