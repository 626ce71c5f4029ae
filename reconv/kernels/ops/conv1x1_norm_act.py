"""act(batch_norm(conv1x1(x))) in training, without ever writing the convolution's output.

For convolutions with few inputs and many outputs, such as the expansion of an inverted residual: reading x and
multiplying again costs less than reading the output. Of tensors as wide as the output, forward writes the activation
and backward reads its gradient twice; separate operations read and write such tensors eleven times. x is saved in
place of the output. All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import ChannelRows, channel_rows, counters
from reconv.kernels.dispatch import CHANNEL_MULTIPLE, MAX_ELEMENTS
from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.ops.batch_norm import ACTIVATION_IDS, NormParams, sum_groups
from reconv.kernels.reference import Activation
from reconv.kernels.triton import conv1x1_norm_act as device

MAX_INPUTS = 64  # with more, products take as long as reading the output
_MIN_EXPANSION = 2  # outputs per input
_MIN_TILE = 16  # of tensor cores
_LINES = 4  # numbers per channel that the input gradient needs
_FILTER_ROWS = 16  # outputs of a program that adds up the filters' gradient


@dataclass(frozen=True, slots=True)
class ExpansionTile:
    """Rows and output channels of a tile, warps, pipeline stages, programs per SM, and a limit of registers."""

    rows: int
    block: int
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 4
    registers: int | None = None  # limit per thread


# By kernel and number of inputs, as padded; measured on an H200 (benchmarks/LOG.md). Instructions per value
# in SASS for Hopper, with 32 inputs and ReLU6: 6 for the statistics, 7 for the output, 13 for the sums, 15 for the
# input gradient.
CONFIGS: dict[str, dict[int, ExpansionTile]] = {
    "statistics": {
        16: ExpansionTile(128, 32),
        32: ExpansionTile(128, 64, programs_per_sm=2),
        64: ExpansionTile(128, 64, programs_per_sm=2),
    },
    "output": {inputs: ExpansionTile(64, 64) for inputs in (16, 32, 64)},
    "gradient_sums": {
        16: ExpansionTile(128, 32, programs_per_sm=3),
        32: ExpansionTile(64, 64, programs_per_sm=3),
        64: ExpansionTile(64, 64, stages=4, programs_per_sm=2),
    },
    "input_gradient": {inputs: ExpansionTile(128, 32, registers=128) for inputs in (16, 32, 64)},
}


@dataclass(frozen=True, slots=True)
class ConvNormInput:
    """The input of a 1x1 convolution, its filters [out, in, 1, 1] and the norm of its output.

    stats [groups, 3, outputs]: mean, unbiased variance, 1 / std.
    """

    x: Tensor
    filters: Tensor
    stats: Tensor
    weight: Tensor
    bias: Tensor

    def tensors(self) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """All tensors, in the order of the kernels' arguments."""
        return self.x, self.filters, self.stats, self.weight, self.bias


def supports(x: Tensor, filters: Tensor) -> bool:
    """True if x and weight [out, in, 1, 1] are supported, with enough outputs per input for a gain.

    Images need more than one pixel: a group of one value has no variance, and sums of rounded values would not cancel.
    """
    outputs, inputs = len(filters), x.shape[1]
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and tuple(filters.shape[1:]) == (inputs, 1, 1)
        and outputs % CHANNEL_MULTIPLE == 0
        and inputs <= MAX_INPUTS
        and outputs >= _MIN_EXPANSION * inputs
        and x.shape[2] * x.shape[3] > 1
        and x.numel() // inputs * outputs <= MAX_ELEMENTS
    )


def conv1x1_batch_norm_act(
    x: Tensor, filters: Tensor, norm: NormParams, groups: Sequence[int], act: Activation
) -> tuple[Tensor, Tensor]:
    """act(norm(conv1x1(x))), and mean, unbiased variance and 1 / std [groups, 3, outputs] of the convolution."""
    output: tuple[Tensor, Tensor] = _Conv1x1BatchNormAct.apply(  # type: ignore[no-untyped-call]
        x, filters, norm.weight, norm.bias, norm, groups, act
    )
    return output


class _Conv1x1BatchNormAct(Function):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        filters: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: NormParams,
        groups: Sequence[int],
        act: Activation,
    ) -> tuple[Tensor, Tensor]:
        rows = channel_rows(x, groups)
        filters = filters.contiguous()
        operand = ConvNormInput(x, filters, statistics(x, filters, norm, rows), weight, bias)
        ctx.save_for_backward(*operand.tensors())
        ctx.rows, ctx.act = rows, act
        ctx.mark_non_differentiable(operand.stats)
        ctx.set_materialize_grads(False)
        return write_output(operand, rows, act), operand.stats

    @staticmethod
    def backward(ctx: Any, da: Tensor, _: None) -> tuple[Tensor | None, ...]:
        operand = ConvNormInput(*ctx.saved_tensors)
        da = da.contiguous(memory_format=torch.channels_last)
        parts = gradient_sums(da, operand, ctx.rows, ctx.act)
        dfilters, sums, lines = weight_gradients(parts, operand, ctx.rows)
        dx = input_gradient(da, operand, lines, ctx.rows, ctx.act) if ctx.needs_input_grad[0] else None
        dweight, dbias = sum_groups(sums[1], operand.weight), sum_groups(sums[0], operand.bias)
        return dx, dfilters, dweight, dbias, None, None, None


def statistics(x: Tensor, filters: Tensor, norm: NormParams, rows: ChannelRows) -> Tensor:
    """Mean, unbiased variance and 1 / std [groups, 3, outputs] of the convolution's output."""
    config, outputs = _config("statistics", rows), len(filters)
    grid = _grid(rows, outputs, config)
    stats = torch.empty(rows.num_groups, 3, outputs, dtype=torch.float32, device=x.device)
    partials = torch.empty(grid[2] * grid[1] * 2 * outputs, dtype=torch.float32, device=x.device)
    launch(
        device.statistics, grid,
        x, filters, norm.running_var, stats, partials, counters(grid[0] * grid[2], x.device),
        *_counts(rows, outputs), norm.eps, **_tile(rows, config),
    )  # fmt: skip
    return stats


def write_output(operand: ConvNormInput, rows: ChannelRows, act: Activation) -> Tensor:
    """The activation of the normalized convolution."""
    config, outputs = _config("output", rows), len(operand.filters)
    samples, _, height, width = operand.x.shape
    a = torch.empty(samples, height, width, outputs, dtype=operand.x.dtype, device=operand.x.device)
    launch(
        device.output, _grid(rows, outputs, config),
        *operand.tensors(), a, *_counts(rows, outputs), ACT=ACTIVATION_IDS[act], **_tile(rows, config),
    )  # fmt: skip
    return a.permute(0, 3, 1, 2)


def gradient_sums(da: Tensor, operand: ConvNormInput, rows: ChannelRows, act: Activation) -> Tensor:
    """Sums over a group's rows [groups, 2 * outputs * inputs + outputs + inputs]: of dz * x, y * x, dz and x."""
    config, outputs, inputs = _config("gradient_sums", rows), len(operand.filters), rows.channels
    grid = _grid(rows, outputs, config)
    size = 2 * outputs * inputs + outputs + inputs
    parts = torch.empty(rows.num_groups, grid[1], size, dtype=torch.float32, device=da.device)
    launch(
        device.gradient_sums, grid,
        da, *operand.tensors(), parts, *_counts(rows, outputs), ACT=ACTIVATION_IDS[act], **_tile(rows, config),
    )  # fmt: skip
    return parts.sum(1)


def weight_gradients(parts: Tensor, operand: ConvNormInput, rows: ChannelRows) -> tuple[Tensor, Tensor, Tensor]:
    """From the sums of `gradient_sums`: the filters' gradient, sums of dz and dz * yhat [2, groups, outputs], and
    factor, summand, slope and offset [groups, 4, outputs] of the input gradient."""
    outputs, dfilters = len(operand.filters), torch.empty_like(operand.filters)
    sums = torch.empty(2, rows.num_groups, outputs, dtype=torch.float32, device=parts.device)
    lines = torch.empty(rows.num_groups, _LINES, outputs, dtype=torch.float32, device=parts.device)
    launch(
        device.weight_gradients, (-(-outputs // _FILTER_ROWS),),
        parts, *operand.tensors()[1:], dfilters, sums, lines, *_counts(rows, outputs), rows.num_groups,
        BLOCK=_FILTER_ROWS, IN=_padded(rows),
    )  # fmt: skip
    return dfilters, sums, lines


def input_gradient(da: Tensor, operand: ConvNormInput, lines: Tensor, rows: ChannelRows, act: Activation) -> Tensor:
    """The gradient of the convolution's input."""
    config, dx = _config("input_gradient", rows), torch.empty_like(operand.x)
    launch(
        device.input_gradient, (_num_tiles(rows, config), 1, rows.num_groups),
        da, operand.x, operand.filters, lines, dx, *_counts(rows, len(operand.filters)),
        ACT=ACTIVATION_IDS[act], **_tile(rows, config),
    )  # fmt: skip
    return dx


def _padded(rows: ChannelRows) -> int:
    """The inputs of a tile: a power of two."""
    return max(_MIN_TILE, 1 << (rows.channels - 1).bit_length())


def _config(kernel: str, rows: ChannelRows) -> ExpansionTile:
    return CONFIGS[kernel][_padded(rows)]


def _counts(rows: ChannelRows, outputs: int) -> tuple[int, int, int, int]:
    return rows.channels // 8, rows.num_rows, rows.group_rows, outputs // 8


def _tile(rows: ChannelRows, config: ExpansionTile) -> dict[str, int]:
    sizes = {"ROWS": config.rows, "BLOCK": config.block, "IN": _padded(rows)}
    tile = sizes | {"STAGES": config.stages, "num_warps": config.warps}
    return tile if config.registers is None else tile | {"maxnreg": config.registers}


def _num_tiles(rows: ChannelRows, config: ExpansionTile) -> int:
    """Tiles below each other, in the largest group."""
    last = rows.num_rows - (rows.num_groups - 1) * rows.group_rows
    return -(-max(rows.group_rows, last) // config.rows)


def _grid(rows: ChannelRows, outputs: int, config: ExpansionTile) -> tuple[int, int, int]:
    """Blocks of output channels, splits of the rows, groups."""
    num_blocks = -(-outputs // config.block)
    num_programs = max(1, config.programs_per_sm * rows.num_sms // (num_blocks * rows.num_groups))
    return num_blocks, min(num_programs, _num_tiles(rows, config), MAX_GRID_YZ), rows.num_groups
