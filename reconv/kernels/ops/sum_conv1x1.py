"""A residual sum with ReLU and the 1x1 convolution that reads it, as one operation.

Forward computes the convolution inside the kernel that writes the sum, where it has few enough channels, so that the
sum is not read again. Backward computes the convolution's input gradient inside the kernel that reduces the gradient
sums of the norm, so that it is neither written nor read: two passes fewer over the block's output. All of it can be
captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels.channels_last import ROWS_PER_THREAD, ChannelRows, channel_rows, counters
from reconv.kernels.conv_output import ConvOutput, DeferredGradient
from reconv.kernels.dispatch import CHANNEL_MULTIPLE
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops import batch_norm
from reconv.kernels.ops import conv1x1_statistics as conv1x1
from reconv.kernels.ops.batch_norm import (
    NormFunction,
    NormInput,
    NormParams,
    NormSumFunction,
    empty_relu_mask,
    input_gradients,
    norm_input,
    other_input,
    row_counts,
    write_output,
)
from reconv.kernels.triton import sum_conv1x1 as device

MAX_OUTPUTS = 256  # of the convolution: with 512 separate kernels are as fast on an H200, its tiles are read so often
_MIN_TILE = 16  # of tensor cores
_LANES = 16  # rows of a tile of the ReLU mask that are in different bytes
_MASK_BLOCK = 64  # channels of such a tile
_ADD, _ADD_NORM = 1, 2  # as in batch_norm/triton.py


@dataclass(frozen=True, slots=True)
class SumConvTile:
    """Rows and channels of a tile, warps, pipeline stages of the product, programs per SM, and a register limit."""

    rows: int
    block: int
    warps: int
    stages: int
    programs_per_sm: int
    registers: int | None = None  # limit per thread


@dataclass(frozen=True, slots=True)
class SumForwardTile:
    """Rows of a tile, warps, pipeline stages, and programs per SM."""

    rows: int
    warps: int
    stages: int
    programs_per_sm: int

    @property
    def lanes(self) -> int:
        """Distance of the rows in a byte of the ReLU mask: those that a thread has."""
        return self.rows // ROWS_PER_THREAD


# By channels and outputs; for others the sum and the convolution are separate. Measured on an H200.
FORWARD_CONFIGS = {(256, 64): SumForwardTile(64, 8, 3, 1), (256, 128): SumForwardTile(64, 8, 3, 1)}

# By the number of outputs of the convolution, rounded up to a power of two, and the number of norms in the sum.
# Measured on an H200 over the layers of ResNet-50 and ResNeXt-101 (benchmarks/LOG.md).
CONFIGS = {
    (64, 1): SumConvTile(64, 64, 4, 3, 3),
    (64, 2): SumConvTile(64, 64, 4, 3, 3),
    (128, 1): SumConvTile(64, 128, 8, 3, 2, 128),
    (128, 2): SumConvTile(64, 64, 4, 3, 3),
    (256, 1): SumConvTile(64, 128, 8, 1, 2, 128),
    (256, 2): SumConvTile(64, 64, 4, 2, 2),
    (512, 1): SumConvTile(64, 128, 8, 1, 1),
    (512, 2): SumConvTile(64, 128, 8, 1, 1),
}
_MIN_CONFIG = 64  # outputs


def supports(x: Tensor, filters: Tensor) -> bool:
    """True if x and weight [out, channels, 1, 1] are supported, and few enough outputs for a gain."""
    if x.dtype not in (torch.bfloat16, torch.float16) or tuple(filters.shape[1:]) != (x.shape[1], 1, 1):
        return False
    rows, config = channel_rows(x, (len(x),)), batch_norm.CONFIGS["sum"]
    has_mask_layout = (rows.block, rows.lanes(config)) == (_MASK_BLOCK, _LANES)
    outputs = len(filters)
    return has_mask_layout and outputs % CHANNEL_MULTIPLE == 0 and outputs <= min(MAX_OUTPUTS, x.shape[1])


def batch_norm_add_relu_conv1x1(
    x: ConvOutput,
    norm: NormParams,
    other: ConvOutput,
    other_norm: NormParams | None,
    filters: Tensor,
    groups: Sequence[int],
    next_norm: NormParams | None = None,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
    """The 1x1 convolution of y = relu(norm(x) + other), y for a second use, and the statistics of x, other and the
    convolution's output.

    With `other_norm`, y = relu(norm(x) + other_norm(other)). The statistics of the output are computed for `next_norm`,
    where the convolution's kernel does it. The gradients of x and other are left to the convolutions before them, where
    they compute them.
    """
    other_params = (None, None) if other_norm is None else (other_norm.weight, other_norm.bias)
    output: tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]
    output = _SumConv1x1.apply(  # type: ignore[no-untyped-call]
        x.y, norm.weight, norm.bias, other.y, *other_params, filters, norm, other_norm, groups, next_norm, x.stats,
        other.stats, x.deferred, None if other_norm is None else other.deferred,
    )  # fmt: skip
    return output


class _SumConv1x1(NormSumFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        other_x: Tensor,
        other_weight: Tensor | None,
        other_bias: Tensor | None,
        filters: Tensor,
        norm: NormParams,
        other_norm: NormParams | None,
        groups: Sequence[int],
        next_norm: NormParams | None,
        stats: Tensor | None,
        other_stats: Tensor | None,
        deferred: DeferredGradient | None,
        other_deferred: DeferredGradient | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor | None]:
        rows = channel_rows(x, groups)
        operand = norm_input(x, weight, bias, norm, rows, stats)
        other = other_input(other_x, other_weight, other_bias, other_norm, rows, other_stats)
        config = None if next_norm is None else FORWARD_CONFIGS.get((rows.channels, len(filters)))
        added = other_x if other is None else other
        if config is None:
            bits = empty_relu_mask(rows, x.device, "relu")
            y = write_output(operand, added, bits, rows, "relu")
            out, out_stats = _conv_output(y, filters, next_norm, groups)
        else:
            assert next_norm is not None
            y, bits, out, out_stats = sum_conv(operand, added, filters.contiguous(), next_norm, rows, config)
        NormSumFunction.save_sum(ctx, operand, other, y, filters, bits, constant=(out_stats,))
        ctx.rows, ctx.deferred, ctx.other_deferred = rows, deferred, other_deferred
        ctx.mask_lanes = _LANES if config is None else config.lanes
        return out, y, operand.stats, None if other is None else other.stats, out_stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, second: Tensor | None, *_: None) -> tuple[Tensor | None, ...]:
        operand, other, (y, filters, bits) = NormSumFunction.saved_sum(ctx)
        dy, second = (None if g is None else g.contiguous(memory_format=torch.channels_last) for g in (dy, second))
        dz = torch.empty_like(operand.x)
        is_fused = dy is not None and second is not None
        dmain, dfilters = conv_gradients(dy, y, filters, (not is_fused, ctx.needs_input_grad[6]))
        if dy is not None and second is not None:
            sums = gradient_sums(dy, filters, second, operand, other, bits, dz, ctx.rows, mask_lanes=ctx.mask_lanes)
        else:
            only = second if dmain is None else dmain.contiguous(memory_format=torch.channels_last)
            assert only is not None
            dz = torch.where(y <= 0, 0, only)  # NaN passes, as in the mask
            sums = batch_norm.gradient_sums(dz, None, operand, other, bits[:0], None, ctx.rows, "none")
        dx, dother = _input_gradients(dz, operand, other, sums, ctx.rows, ctx.deferred, ctx.other_deferred)
        of_other = NormSumFunction.other_gradients(other, sums, dz, dother)
        return dx, *NormFunction.parameter_gradients(operand, sums), *of_other, dfilters, *([None] * 8)


def sum_conv(
    operand: NormInput,
    other: NormInput | Tensor,
    filters: Tensor,
    norm: NormParams,
    rows: ChannelRows,
    config: SumForwardTile,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """y = relu(norm(x) + other), its ReLU mask, the convolution of y, and the statistics of that for a norm."""
    x, outputs, device_of = operand.x, len(filters), operand.x.device
    samples, _, height, width = x.shape
    grid, tiles = rows.tile_grid(config.rows, config.programs_per_sm), -(-rows.largest_group // config.rows)
    y = torch.empty_like(x)
    bits = torch.empty(rows.num_groups * tiles * config.lanes * rows.channels, dtype=torch.uint8, device=device_of)
    out = torch.empty(samples, height, width, outputs, dtype=x.dtype, device=device_of)
    stats = torch.empty(rows.num_groups, 3, outputs, dtype=torch.float32, device=device_of)
    partials = torch.empty(rows.num_groups * grid[1] * 2 * outputs, dtype=torch.float32, device=device_of)
    has_norm = isinstance(other, NormInput)
    added = other.tensors() if isinstance(other, NormInput) else (other, *operand.tensors()[1:])  # the last: not used
    launch(
        device.sum_conv, grid,
        *operand.tensors(), *added, filters, y, bits, out, norm.running_var, stats, partials,
        counters(grid[2], device_of), rows.num_rows, rows.group_rows, tiles, norm.eps,
        RESIDUAL=_ADD_NORM if has_norm else _ADD, ROWS=config.rows, CHANNELS=rows.channels, OUT=outputs,
        STAGES=config.stages, num_warps=config.warps,
    )  # fmt: skip
    return y, bits, out.permute(0, 3, 1, 2), stats


def _input_gradients(
    dz: Tensor,
    operand: NormInput,
    other: NormInput | None,
    sums: Tensor,
    rows: ChannelRows,
    deferred: DeferredGradient | None,
    other_deferred: DeferredGradient | None,
) -> tuple[Tensor, Tensor | None]:
    """The gradients of the norms' inputs, or dz in place of those that are left to the convolutions before them."""
    if deferred is None and other_deferred is None:
        return input_gradients(dz, operand, other, sums, rows, "none")
    dx, dother = dz, dz
    if deferred is not None:
        deferred.set(operand, sums[0], sums[1])
    else:
        dx, _none = input_gradients(dz, operand, None, sums, rows, "none")
    if other is not None and other_deferred is not None:
        other_deferred.set(other, sums[0], sums[2])
    elif other is not None:
        dother, _none = input_gradients(dz, other, None, (sums[0], sums[2]), rows, "none")
    return dx, dother


def _conv_output(
    y: Tensor, filters: Tensor, norm: NormParams | None, groups: Sequence[int]
) -> tuple[Tensor, Tensor | None]:
    """The 1x1 convolution of y, and its statistics for a norm where one kernel computes both."""
    config = conv1x1.tile_config(y.shape[1], len(filters))
    if norm is None or config is None or not conv1x1.supports(y, filters):
        return F.conv2d(y, filters), None
    return conv1x1.conv_output(y, filters.contiguous(), norm, groups, config)


def conv_gradients(
    dy: Tensor | None, y: Tensor, filters: Tensor, needs_grad: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of the convolution's input and weight, as far as they are wanted."""
    if dy is None or not any(needs_grad):
        return None, None
    result: tuple[Tensor | None, Tensor | None, None] = torch.ops.aten.convolution_backward(
        dy, y, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [*needs_grad, False]
    )
    return result[:2]


def gradient_sums(
    dy: Tensor,
    filters: Tensor,
    gradient2: Tensor,
    operand: NormInput,
    other: NormInput | None,
    bits: Tensor,
    dz: Tensor,
    rows: ChannelRows,
    config: SumConvTile | None = None,
    mask_lanes: int = _LANES,
) -> Tensor:
    """Sums of dz, dz * xhat and dz * xhat of the other operand [3, groups, channels]; also writes dz.

    `dy` is the gradient of the convolution's output, `gradient2` that of the second use of its input. `bits` is the
    ReLU mask, whose bytes have rows `mask_lanes` apart.
    """
    config = config or CONFIGS[max(_MIN_CONFIG, _padded(len(filters))), 1 if other is None else 2]
    mask_rows = ROWS_PER_THREAD * mask_lanes
    if config.rows > mask_rows:
        raise ValueError(f"tiles of {config.rows} rows and a ReLU mask of {mask_rows}")
    grid = rows.tile_grid(config.rows, config.programs_per_sm, -(-rows.channels // config.block))
    sums = torch.empty(3, rows.num_groups, rows.channels, dtype=torch.float32, device=dy.device)
    partials = torch.empty(grid[1] * grid[2] * 3 * rows.channels, dtype=torch.float32, device=dy.device)
    x, stats = (operand if other is None else other).tensors()[:2]
    limit = {} if config.registers is None else {"maxnreg": config.registers}
    launch(
        device.gradient_sums, grid,
        dy, filters.contiguous(), gradient2, *operand.tensors()[:2], x, stats, bits, dz, sums, partials,
        counters(grid[0] * grid[2], dy.device), *row_counts(rows), -(-rows.largest_group // mask_rows),
        len(filters) // 8,
        RESIDUAL=_ADD if other is None else _ADD_NORM, ROWS=config.rows, BLOCK=config.block,
        OUT=_padded(len(filters)), LANES=_LANES, MASK_LANES=mask_lanes, num_warps=config.warps,
        num_stages=config.stages, **limit,
    )  # fmt: skip
    return sums


def _padded(outputs: int) -> int:
    """The outputs of a tile: a power of two, as tensor cores need."""
    return max(_MIN_TILE, 1 << (outputs - 1).bit_length())
