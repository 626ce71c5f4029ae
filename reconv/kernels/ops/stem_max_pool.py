"""A stem's convolution over blocks of pixels, batch norm, ReLU and 3x3 max-pool of stride 2 as one operation.

Forward launches the kernels of `stem` and `norm_max_pool`. Backward computes the weight gradient without writing the
gradient of the convolution's output: images need none. All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from reconv.kernels.channels_last import split_tiles
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import (
    NormFunction,
    NormInput,
    NormParams,
)
from reconv.kernels.ops.norm_max_pool import PooledNormFunction
from reconv.kernels.ops.partial_sums import add_partials
from reconv.kernels.ops.stem import conv_output
from reconv.kernels.triton import stem_max_pool as device
from reconv.kernels.window import STEM_WINDOW, PoolWindow


@dataclass(frozen=True, slots=True)
class StemGradientTile:
    """Columns and outputs of a tile of two lines, warps, pipeline stages, programs per SM, and a limit of registers per
    thread."""

    columns: int = 16
    outputs: int = 64
    warps: int = 4
    stages: int = 3
    programs_per_sm: int = 2
    registers: int | None = None


GRADIENT_CONFIG = StemGradientTile()


def stem_conv_norm_relu_max_pool(
    blocks: Tensor, filters: Tensor, norm: NormParams, groups: Sequence[int], window: PoolWindow = STEM_WINDOW
) -> tuple[Tensor, Tensor, Tensor]:
    """max_pool(relu(norm(conv(blocks)))), twice (see `batch_norm_add_act`), and the statistics of the convolution.

    Filters are those of `stem.space_to_depth_weight` in any dtype; blocks have no gradient.
    """
    output: tuple[Tensor, Tensor, Tensor] = _StemConvNormReluMaxPool.apply(  # type: ignore[no-untyped-call]
        filters, norm.weight, norm.bias, blocks, norm, tuple(groups), window
    )
    return output


class _StemConvNormReluMaxPool(PooledNormFunction):
    @staticmethod
    def forward(
        ctx: Any,
        filters: Tensor,
        weight: Tensor,
        bias: Tensor,
        blocks: Tensor,
        norm: NormParams,
        groups: Sequence[int],
        window: PoolWindow,
    ) -> tuple[Tensor, Tensor, Tensor]:
        x, stats = conv_output(blocks, filters, norm, groups)
        ctx.dtype = filters.dtype
        return PooledNormFunction.forward_pooled(ctx, NormInput(x, stats, weight, bias), groups, window, blocks)

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None, _: None) -> tuple[Tensor | None, ...]:
        operand, (peak, place, blocks) = NormFunction.saved(ctx)
        dz, sums = PooledNormFunction.pooled_gradients(ctx, first, second, operand, peak)
        dfilters = None
        if ctx.needs_input_grad[0]:
            dfilters = weight_gradient(dz, place, operand, sums, blocks, ctx.groups, ctx.window, ctx.dtype)
        return dfilters, *NormFunction.parameter_gradients(operand, sums), None, None, None, None


def weight_gradient(
    dz: Tensor,
    place: Tensor,
    operand: NormInput,
    sums: Tensor,
    blocks: Tensor,
    groups: Sequence[int],
    window: PoolWindow = STEM_WINDOW,
    dtype: torch.dtype = torch.float32,
    config: StemGradientTile = GRADIENT_CONFIG,
) -> Tensor:
    """The gradient of the convolution's filters [outputs, 16, taps, taps], channels_last.

    `dz` and `place` are of pooled size, the operand is that of the norm, `sums` are those of its gradient.
    """
    samples, outputs, height, width = operand.x.shape
    taps, (above, left) = blocks.shape[2] - height + 1, (window.before(side) for side in (height, width))
    columns, lines = (width + 2 - left) // 2 * 2, (height + 2 - above) // 2
    num_blocks, num_tiles = -(-outputs // config.outputs), -(-max(groups) * columns // config.columns) * lines
    splits, tiles = split_tiles(blocks, groups, num_tiles, config.programs_per_sm, num_blocks)
    partials = torch.empty(
        len(groups) * splits, outputs, taps, taps, blocks.shape[1], dtype=torch.float32, device=blocks.device
    )
    tile = {"TAPS": taps, "COLUMNS": config.columns, "BLOCK": config.outputs, "STAGES": config.stages}
    tile |= {"num_warps": config.warps}
    launch(
        device.weight_gradient, (num_blocks, splits, len(groups)),
        dz, place, *operand.tensors()[:3], sums, blocks, partials, samples, groups[0], height, width, *place.shape[2:],
        above, left, tiles, outputs // 8,
        **(tile if config.registers is None else tile | {"maxnreg": config.registers}),
    )  # fmt: skip
    dfilters = torch.empty(partials.shape[1:], dtype=dtype, device=blocks.device)
    add_partials(partials, dfilters)
    return dfilters.permute(0, 3, 1, 2)
