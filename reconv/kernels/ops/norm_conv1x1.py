"""1x1 convolution of act(batch_norm(x)) without writing the activation to memory.

Forward reads x twice (statistics, product) and saves it; backward reads it twice and writes its gradient once. It pays
off where the convolution has few outputs: their gradient is read in place of the activation's, and multiplied twice.
All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconv.kernels.channels_last import ChannelRows, channel_rows, counters
from reconv.kernels.dispatch import CHANNEL_MULTIPLE
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import (
    ACTIVATION_IDS,
    NormFunction,
    NormInput,
    NormParams,
    norm_input,
    row_counts,
)
from reconv.kernels.ops.partial_sums import add_partials
from reconv.kernels.reference import Activation
from reconv.kernels.triton import norm_conv1x1 as device

MAX_OUTPUTS = 64  # with 96, separate kernels were faster over MobileNetV2's layers on an H200
_MIN_TILE = 16  # of tensor cores
_STAGES = 3  # pipeline stages
_NARROW, _WIDE = 32, 64  # channels of a tile


@dataclass(frozen=True, slots=True)
class _TileConfig:
    """Rows and channels of a tile, warps, programs per SM, and a limit of registers per thread."""

    rows: int
    block: int
    warps: int
    programs_per_sm: int
    registers: int | None = None  # limit per thread


# Counted in SASS for Hopper: 11 instructions per value in forward, 22 for the sums, 17 for the gradient. With other
# tiles Triton computes the activation up to four times, or keeps too many norm parameters in registers.
_FORWARD = _TileConfig(128, _NARROW, 4, 1)
_SUMS = {_NARROW: _TileConfig(64, _NARROW, 4, 4, 128), _WIDE: _TileConfig(64, _WIDE, 8, 2, 128)}
_GRADIENT = {_NARROW: _TileConfig(64, _NARROW, 4, 4), _WIDE: _TileConfig(64, _WIDE, 8, 4)}


def supports(x: Tensor, filters: Tensor) -> bool:
    """True if x and weight [out, channels, 1, 1] are supported and few enough outputs for a gain."""
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and tuple(filters.shape[1:]) == (x.shape[1], 1, 1)
        and len(filters) % CHANNEL_MULTIPLE == 0
        and len(filters) <= min(MAX_OUTPUTS, x.shape[1])
    )


def batch_norm_act_conv1x1(
    x: Tensor,
    norm: NormParams,
    filters: Tensor,
    groups: Sequence[int],
    act: Activation,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """conv1x1(act(norm(x))), and mean, unbiased variance and 1 / std [groups, 3, channels] of x, which may be given."""
    output: tuple[Tensor, Tensor] = _BatchNormActConv1x1.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, filters, norm, groups, act, stats
    )
    return output


class _BatchNormActConv1x1(NormFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        filters: Tensor,
        norm: NormParams,
        groups: Sequence[int],
        act: Activation,
        stats: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        ctx.rows, ctx.act = channel_rows(x, groups), act
        operand, filters = norm_input(x, weight, bias, norm, ctx.rows, stats), filters.contiguous()
        NormFunction.save(ctx, operand, filters)
        return conv_output(operand, filters, ctx.rows, act), operand.stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        operand, (filters,) = NormFunction.saved(ctx)
        dy = dy.contiguous(memory_format=torch.channels_last)
        sums, dfilters = gradient_sums(dy, operand, filters, ctx.rows, ctx.act)
        dx = input_gradient(dy, operand, filters, sums, ctx.rows, ctx.act)
        return dx, *NormFunction.parameter_gradients(operand, sums), dfilters, None, None, None, None


def conv_output(operand: NormInput, filters: Tensor, rows: ChannelRows, act: Activation) -> Tensor:
    """The convolution's output."""
    samples, _, height, width = operand.x.shape
    y = torch.empty(samples, height, width, len(filters), dtype=operand.x.dtype, device=operand.x.device)
    launch(
        device.project, (_num_tiles(rows, _FORWARD), 1, rows.num_groups),
        *operand.tensors(), filters, y, *row_counts(rows), len(filters) // 8,
        ACT=ACTIVATION_IDS[act], **_shape(filters, _FORWARD),
    )  # fmt: skip
    return y.permute(0, 3, 1, 2)


def gradient_sums(
    dy: Tensor, operand: NormInput, filters: Tensor, rows: ChannelRows, act: Activation
) -> tuple[Tensor, Tensor]:
    """Sums of dz and dz * xhat [2, groups, channels], and the gradient of the filters."""
    form = _SUMS[_block(rows)]
    grid = _grid(rows, form)
    num_parts, channels = grid[1] * rows.num_groups, rows.channels
    sums = torch.empty(2, rows.num_groups, channels, dtype=torch.float32, device=dy.device)
    partials = torch.empty(num_parts * 2 * channels, dtype=torch.float32, device=dy.device)
    parts = torch.empty(num_parts, len(filters), channels, dtype=torch.float32, device=dy.device)
    launch(
        device.gradient_sums, grid,
        dy, *operand.tensors(), filters, sums, parts, partials, counters(grid[0] * grid[2], dy.device),
        *row_counts(rows), len(filters) // 8,
        ACT=ACTIVATION_IDS[act], **_shape(filters, form),
    )  # fmt: skip
    return sums, add_partials(parts, torch.empty_like(filters))


def input_gradient(
    dy: Tensor, operand: NormInput, filters: Tensor, sums: Tensor, rows: ChannelRows, act: Activation
) -> Tensor:
    """The gradient of the norm's input."""
    form, dx = _GRADIENT[_block(rows)], torch.empty_like(operand.x)
    launch(
        device.gradient, _grid(rows, form),
        dy, *operand.tensors(), filters, sums, dx, *row_counts(rows), len(filters) // 8,
        ACT=ACTIVATION_IDS[act], **_shape(filters, form),
    )  # fmt: skip
    return dx


def _block(rows: ChannelRows) -> int:
    return _NARROW if rows.channels <= _NARROW else _WIDE


def _num_tiles(rows: ChannelRows, form: _TileConfig) -> int:
    """Tiles below each other, in the largest group."""
    last = rows.num_rows - (rows.num_groups - 1) * rows.group_rows
    return -(-max(rows.group_rows, last) // form.rows)


def _grid(rows: ChannelRows, form: _TileConfig) -> tuple[int, int, int]:
    """Blocks of channels, splits of the rows, groups."""
    num_blocks = -(-rows.channels // form.block)
    num_programs = max(1, form.programs_per_sm * rows.num_sms // (num_blocks * rows.num_groups))
    return num_blocks, min(num_programs, _num_tiles(rows, form)), rows.num_groups


def _shape(filters: Tensor, form: _TileConfig) -> dict[str, int]:
    outputs = max(_MIN_TILE, 1 << (len(filters) - 1).bit_length())
    tile = {"ROWS": form.rows, "BLOCK": form.block, "OUT": outputs, "STAGES": _STAGES, "num_warps": form.warps}
    return tile if form.registers is None else tile | {"maxnreg": form.registers}
