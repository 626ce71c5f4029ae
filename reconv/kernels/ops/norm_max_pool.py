"""Batch norm, ReLU and the 3x3 max-pool of stride 2 after a stem's convolution.

Forward reads the input twice (statistics, pool) and writes pooled sizes only; the backward sums read pooled sizes too.
Supports the padding of `window.STEM_WINDOWS`. Of equal inputs in a window the first wins, as in torch. Inputs are
compared, so that torch may choose another one where different inputs have the same normalized value after rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from reconv.kernels.channels_last import channel_rows
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import (
    CONFIGS,
    NormFunction,
    NormInput,
    NormParams,
    gradient_sums,
    norm_input,
    output_gradients,
    row_counts,
    tile_constants,
)
from reconv.kernels.triton import norm_max_pool as device
from reconv.kernels.window import STEM_WINDOW, PoolWindow

_COLUMNS = 8  # of a forward tile
_WARP_VALUES = 32 * 8  # 8 channels per thread


def batch_norm_relu_max_pool(
    x: Tensor,
    norm: NormParams,
    groups: Sequence[int],
    window: PoolWindow = STEM_WINDOW,
    stats: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """max_pool(relu(norm(x))), twice (see `batch_norm_add_act`), and the statistics of x.

    `stats` are these statistics, where the operation before the norm computed them.
    """
    output: tuple[Tensor, Tensor, Tensor] = _BatchNormReluMaxPool.apply(  # type: ignore[no-untyped-call]
        x, norm.weight, norm.bias, norm, tuple(groups), window, stats
    )
    return output


class PooledNormFunction(NormFunction):
    """Base of the autograd functions of max_pool(relu(norm(x))), which return the output twice."""

    @staticmethod
    def forward_pooled(
        ctx: Any, operand: NormInput, groups: Sequence[int], window: PoolWindow, *others: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The output, twice, and the statistics of x."""
        y, peak, place = write_pooled(operand, groups, window)
        NormFunction.save(ctx, operand, peak, place, *others)
        ctx.groups, ctx.window = groups, window
        return y, y.detach(), operand.stats

    @staticmethod
    def pooled_gradients(
        ctx: Any, first: Tensor | None, second: Tensor | None, operand: NormInput, peak: Tensor
    ) -> tuple[Tensor, Tensor]:
        """The gradient of the pooled values, and sums over a group of it before the ReLU and of that times xhat."""
        gradient, gradient2 = output_gradients(first, second)
        dz = None if gradient2 is None else torch.empty_like(peak)
        peaks = NormInput(peak, operand.stats, operand.weight, operand.bias)
        sums = gradient_sums(gradient, gradient2, peaks, None, None, dz, channel_rows(peak, ctx.groups), "relu")
        return gradient if dz is None else dz, sums


class _BatchNormReluMaxPool(PooledNormFunction):
    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        norm: NormParams,
        groups: Sequence[int],
        window: PoolWindow,
        stats: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        operand = norm_input(x, weight, bias, norm, channel_rows(x, groups), stats)
        return PooledNormFunction.forward_pooled(ctx, operand, groups, window)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        operand, (peak, place) = NormFunction.saved(ctx)
        dz, sums = PooledNormFunction.pooled_gradients(ctx, first, second, operand, peak)
        dx = input_gradient(dz, place, operand, sums, ctx.groups, ctx.window)
        return dx, *NormFunction.parameter_gradients(operand, sums), *([None] * 4)


def write_pooled(
    operand: NormInput, groups: Sequence[int], window: PoolWindow = STEM_WINDOW
) -> tuple[Tensor, Tensor, Tensor]:
    """The pooled output, the inputs it came from, and their indices within their windows."""
    samples, channels, height, width = operand.x.shape
    sides = (height, width, window.out_side(height), window.out_side(width))
    y = torch.empty(samples, channels, *sides[2:], dtype=operand.x.dtype, device=operand.x.device,
                    memory_format=torch.channels_last)  # fmt: skip
    peak, place = torch.empty_like(y), torch.empty_like(y, dtype=torch.uint8)
    block, across = channel_rows(y, groups).block, -(-sides[3] // _COLUMNS)
    tiles = across * -(-sides[2] // 2)
    launch(
        device.pool, (samples * tiles, -(-channels // block)),
        *operand.tensors(), y, peak, place, channels // 8, groups[0], len(groups), *sides,
        window.before(height), window.before(width), across, tiles,
        WIDE=_COLUMNS, BLOCK=block, num_warps=max(1, _COLUMNS * block // _WARP_VALUES),
    )  # fmt: skip
    return y, peak, place


def input_gradient(
    dz: Tensor, place: Tensor, operand: NormInput, sums: Tensor, groups: Sequence[int], window: PoolWindow = STEM_WINDOW
) -> Tensor:
    """The gradient of the input of norm, ReLU and pool."""
    dx = torch.empty_like(operand.x)
    rows = channel_rows(operand.x, groups)
    height, width = operand.x.shape[2:]
    sides = (height, width, *place.shape[2:])
    launch(
        device.pool_gradient, rows.row_grid(CONFIGS["pool"]),
        dz, place, *operand.tensors(), sums, dx, *row_counts(rows), *sides, window.before(height), window.before(width),
        **tile_constants(rows, CONFIGS["pool"]),
    )  # fmt: skip
    return dx
