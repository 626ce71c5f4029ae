"""A 1x1 convolution between two batch norms, whose backward pass includes part of that of the norm behind it.

The backward pass of the norm behind the convolution leaves its second half, the gradient of its input, to the
convolution (`DeferredGradient`). One kernel then computes that gradient tile by tile and multiplies it for the gradient
of the convolution's input; it also reduces the gradient sums of the norm before the convolution. With few channels it
multiplies it for the gradient of the filters too, and never writes it. All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import ChannelRows, channel_rows, counters
from reconv.kernels.conv_output import ConvOutput, DeferredGradient
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops import conv1x1_statistics as conv1x1
from reconv.kernels.ops.batch_norm import (
    NormFunction,
    NormInput,
    NormParams,
    gradient_sums,
    input_gradients,
    norm_input,
    write_output,
)
from reconv.kernels.ops.partial_sums import add_partials
from reconv.kernels.triton import conv1x1_norm_backward as device


@dataclass(frozen=True, slots=True)
class BackwardTile:
    """Rows of a tile, warps, pipeline stages, programs per SM, a register limit, and channels of a tile."""

    rows: int
    warps: int
    stages: int
    programs_per_sm: int
    registers: int | None = None  # limit per thread
    block: int | None = None  # None: all of them, and the gradient of the convolution's output is never written


# By outputs and inputs of the convolution, and whether there is a norm before it.
# Measured on an H200 (benchmarks/LOG.md).
CONFIGS = {
    (256, 64, True): BackwardTile(64, 8, 3, 1),
    (256, 64, False): BackwardTile(64, 8, 3, 1),
    (256, 128, True): BackwardTile(32, 8, 3, 1),
    (512, 128, True): BackwardTile(64, 4, 3, 2, None, 64),
}


def supports(x: Tensor, filters: Tensor, has_norm: bool) -> bool:
    """True if kernels compute the backward pass of a convolution of x with weight [out, channels, 1, 1], and of a norm
    and ReLU before it.
    """
    return (
        x.dtype in (torch.bfloat16, torch.float16)
        and (*filters.shape[:2], has_norm) in CONFIGS
        and conv1x1.supports(x, filters)
    )


def norm_relu_conv1x1_before_norm(
    x: Tensor, norm: NormParams, filters: Tensor, next_norm: NormParams, groups: Sequence[int]
) -> tuple[ConvOutput, Tensor]:
    """The convolution of relu(norm(x)), and the statistics of x."""
    deferred = DeferredGradient()
    y, stats, x_stats = _NormReluConv1x1.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, filters, norm, next_norm, groups, deferred
    )
    return ConvOutput(y, stats, deferred), x_stats


def conv1x1_before_norm(x: Tensor, filters: Tensor, next_norm: NormParams, groups: Sequence[int]) -> ConvOutput:
    """The convolution of x."""
    deferred = DeferredGradient()
    y, stats = _Conv1x1.apply(x, filters, next_norm, groups, deferred)  # type: ignore[no-untyped-call]
    return ConvOutput(y, stats, deferred)


class _NormReluConv1x1(NormFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        filters: Tensor,
        norm: NormParams,
        next_norm: NormParams,
        groups: Sequence[int],
        deferred: DeferredGradient,
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows, filters = channel_rows(x, groups), filters.contiguous()
        operand = norm_input(x, weight, bias, norm, rows, None)
        tile = conv1x1.tile_config(x.shape[1], len(filters))
        assert tile is not None, "`supports` is false"
        is_written = tile.inputs is not None or CONFIGS[*filters.shape[:2], True].block is not None
        used = write_output(operand, None, None, rows, "relu") if is_written else None
        y, stats = conv1x1.conv_output(
            x if used is None else used, filters, next_norm, groups, tile, operand if used is None else None
        )
        NormFunction.save(ctx, operand, filters, used, constant=(stats,))
        ctx.rows, ctx.deferred = rows, deferred
        return y, stats, operand.stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        operand, (filters, used) = NormFunction.saved(ctx)
        rows, dy = ctx.rows, dy.contiguous(memory_format=torch.channels_last)
        taken = ctx.deferred.take()
        if taken is None:
            used = write_output(operand, None, None, rows, "relu") if used is None else used
            dinput, dfilters = _conv_gradients(dy, used, filters, (True, ctx.needs_input_grad[3]))
            sums = gradient_sums(dinput, None, operand, None, None, None, rows, "relu")
            dx, _other = input_gradients(dinput, operand, None, sums, rows, "relu")
        else:
            inputs = used if ctx.needs_input_grad[3] else None
            dinput, dfilters, sums = gradients(dy, taken, operand, filters, rows, inputs)
            dx, _other = input_gradients(dinput, operand, None, sums, rows, "none")
        return dx, *NormFunction.parameter_gradients(operand, sums), dfilters, None, None, None, None


class _Conv1x1(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, filters: Tensor, next_norm: NormParams, groups: Sequence[int], deferred: DeferredGradient
    ) -> tuple[Tensor, Tensor]:
        filters, tile = filters.contiguous(), conv1x1.tile_config(x.shape[1], len(filters))
        assert tile is not None, "`supports` is false"
        y, stats = conv1x1.conv_output(x, filters, next_norm, groups, tile)
        ctx.save_for_backward(x, filters)
        ctx.rows, ctx.deferred = channel_rows(x, groups), deferred
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, *_: None) -> tuple[Tensor | None, ...]:
        x, filters = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        taken = ctx.deferred.take()
        if taken is None:
            dx, dfilters = _conv_gradients(dy, x, filters, ctx.needs_input_grad[:2])
        else:
            dx, dfilters, _sums = gradients(dy, taken, x, filters, ctx.rows)
        return dx, dfilters, None, None, None


def _conv_gradients(dy: Tensor, x: Tensor, filters: Tensor, needs_grad: Sequence[bool]) -> tuple[Tensor, Tensor | None]:
    """The gradients of the convolution's input and filters, as far as they are wanted."""
    result: tuple[Tensor, Tensor | None, None] = torch.ops.aten.convolution_backward(
        dy, x, filters, None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1, [*needs_grad, False]
    )
    return result[:2]


def gradients(
    dz: Tensor,
    behind: tuple[NormInput, Tensor, Tensor],
    x: NormInput | Tensor,
    filters: Tensor,
    rows: ChannelRows,
    used: Tensor | None = None,
    config: BackwardTile | None = None,
) -> tuple[Tensor, Tensor | None, Tensor]:
    """The gradients of the convolution's input, before the ReLU if it has a norm, and of the filters; and the sums of
    dz and dz * xhat [2, groups, channels] of the input's norm, if it has one.

    `dz` is the gradient of the output of the norm behind the convolution, `behind` that norm, with the sums of dz and
    dz * xhat. `used` is the convolution's input, relu(norm(x)), where it was written and filters need a gradient.
    """
    config = config or CONFIGS[*filters.shape[:2], isinstance(x, NormInput)]
    if config.block is None:
        return gradients_of_all(dz, behind, x, filters, rows, config)
    assert isinstance(x, NormInput), "an input without a norm is not supported"
    dx, dy, sums = gradients_in_blocks(dz, behind, x, filters, rows, config)
    return dx, None if used is None else _conv_gradients(dy, used, filters, (False, True))[1], sums


def gradients_of_all(
    dz: Tensor,
    behind: tuple[NormInput, Tensor, Tensor],
    x: NormInput | Tensor,
    filters: Tensor,
    rows: ChannelRows,
    config: BackwardTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input and filters and the sums of the input's norm, by tiles with all channels."""
    norm, *norm_sums = behind
    has_norm = isinstance(x, NormInput)
    operand = x if isinstance(x, NormInput) else NormInput(x, norm.stats, norm.weight, norm.bias)  # the last: not used
    outputs, inputs = filters.shape[:2]
    grid, sums, partials = _reduction(rows, config, dz.device)
    dx = torch.empty_like(operand.x)
    parts = torch.empty(grid[1] * grid[2], outputs, inputs, dtype=torch.float32, device=dz.device)
    launch(
        device.gradients, grid,
        dz, *norm.tensors()[:3], *norm_sums, *operand.tensors(), filters, dx, parts, sums, partials,
        counters(grid[2], dz.device), rows.num_rows, rows.group_rows,
        HAS_NORM=has_norm, OUT=outputs, IN=inputs, **_constants(config),
    )  # fmt: skip
    return dx, add_partials(parts, torch.empty_like(filters)), sums


def gradients_in_blocks(
    dz: Tensor,
    behind: tuple[NormInput, Tensor, Tensor],
    x: NormInput,
    filters: Tensor,
    rows: ChannelRows,
    config: BackwardTile,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input and output and the sums of the input's norm, by tiles with a block of channels."""
    norm, *norm_sums = behind
    grid, sums, partials = _reduction(rows, config, dz.device)
    dx, dy = torch.empty_like(x.x), torch.empty_like(dz)
    launch(
        device.gradients_in_blocks, grid,
        dz, *norm.tensors()[:3], *norm_sums, *x.tensors(), filters, dy, dx, sums, partials,
        counters(grid[2], dz.device), rows.num_rows, rows.group_rows,
        OUT=filters.shape[0], IN=filters.shape[1], BLOCK=config.block or len(filters), **_constants(config),
    )  # fmt: skip
    return dx, dy, sums


def _reduction(
    rows: ChannelRows, config: BackwardTile, on: torch.device
) -> tuple[tuple[int, int, int], Tensor, Tensor]:
    """The launch grid, and memory for the sums of the input's norm and for partial sums."""
    grid = rows.tile_grid(config.rows, config.programs_per_sm)
    sums = torch.empty(2, rows.num_groups, rows.channels, dtype=torch.float32, device=on)
    return grid, sums, torch.empty(grid[1] * grid[2] * 2 * rows.channels, dtype=torch.float32, device=on)


def _constants(config: BackwardTile) -> dict[str, int]:
    tile = {"ROWS": config.rows, "STAGES": config.stages, "num_warps": config.warps}
    return tile if config.registers is None else tile | {"maxnreg": config.registers}
