"""Grouped 3x3 convolutions of stride 1 with 4, 8, 16 or 32 channels per group, by our own kernels in place of cuDNN's.

Values and gradients are those of F.conv2d up to the order of sums, where they are finite: groups of less than 16
channels are computed 16 channels at a time, so that a NaN or an infinity reaches all of these.

On an H200, cuDNN's took 12.7 ms of a ResNeXt-101 32x4d step (bf16, batch 256), where memory bandwidth allows 3 ms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import channel_rows
from reconv.kernels.dispatch import MAX_ELEMENTS
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.partial_sums import add_partials
from reconv.kernels.triton import grouped_conv as device

_BLOCK = 16  # channels that a warp computes
_TAPS = 9
_FILTERS, _FILTER_WARPS = 1024, 4  # filter values and warps of a program that transposes them


@dataclass(frozen=True, slots=True)
class GroupedConvTile:
    """Columns of a program, blocks of 16 channels (one per warp), lines that are loaded ahead (1 or 2), the parts that
    an image's lines are divided into, and a limit of registers per thread."""

    columns: int
    blocks: int
    ahead: int
    parts: int
    registers: int | None = None


@dataclass(frozen=True, slots=True)
class GroupedGradientTile:
    """Columns that a program loads at once, blocks of 16 channels (one per warp), lines that are loaded ahead (1 or 2),
    programs per SM, and a limit of registers per thread."""

    columns: int
    blocks: int
    ahead: int
    programs_per_sm: int
    registers: int | None = None


# By channels per group; None: cuDNN's kernel. Measured on an H200 (benchmarks/LOG.md).
FORWARD: dict[int, GroupedConvTile | None] = {
    4: GroupedConvTile(16, 4, 1, 1),
    8: GroupedConvTile(16, 4, 1, 1),
    16: GroupedConvTile(16, 4, 1, 1),
    32: None,
}
INPUT_GRADIENT: dict[int, GroupedConvTile | None] = dict(FORWARD)
WEIGHT_GRADIENT: dict[int, GroupedGradientTile | None] = {
    4: GroupedGradientTile(32, 4, 2, 2),
    8: None,
    16: None,
    32: None,
}


def supports(x: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """True if kernels compute at least one pass of the convolution of x, which `dispatch` supports, with weight
    [channels, channels per group, 3, 3], both cast to dtype.
    """
    size = weight.shape[1]
    tables: tuple[dict[int, Any], ...] = (FORWARD, INPUT_GRADIENT, WEIGHT_GRADIENT)
    return (
        dtype in (torch.bfloat16, torch.float16)
        and tuple(weight.shape) == (x.shape[1], size, 3, 3)
        and x.shape[1] % max(size, _BLOCK) == 0
        and x.numel() <= MAX_ELEMENTS
        and any(table.get(size) is not None for table in tables)
    )


def grouped_conv(x: Tensor, weight: Tensor) -> Tensor:
    """The 3x3 convolution of x [n, channels, height, width] with weight [channels, channels per group, 3, 3]."""
    output: Tensor = _GroupedConv.apply(x, weight)  # type: ignore[no-untyped-call]
    return output


class _GroupedConv(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        config = FORWARD[weight.shape[1]]
        return _conv2d(x, weight) if config is None else conv_output(x, weight, config)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        wants_dx, wants_dweight = ctx.needs_input_grad
        dx_config, dweight_config = INPUT_GRADIENT[weight.shape[1]], WEIGHT_GRADIENT[weight.shape[1]]
        is_left = [wants_dx and dx_config is None, wants_dweight and dweight_config is None]
        dx, dweight = cudnn_gradients(dy, x, weight, is_left) if any(is_left) else (None, None)
        if wants_dx and dx_config is not None:
            dx = input_gradient(dy, weight, dx_config)
        if wants_dweight and dweight_config is not None:
            dweight = weight_gradient(dy, x, weight, dweight_config)
        return dx, dweight


def _conv2d(x: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(x, weight, padding=1, groups=len(weight) // weight.shape[1])


def cudnn_gradients(
    dy: Tensor, x: Tensor, weight: Tensor, needs_grad: list[bool]
) -> tuple[Tensor | None, Tensor | None]:
    """cuDNN's gradients of input and weight, those that are wanted."""
    dx, dweight, _ = torch.ops.aten.convolution_backward(
        *(dy, x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], len(weight) // weight.shape[1]),
        [*needs_grad, False],
    )
    return dx, dweight


def conv_output(x: Tensor, weight: Tensor, config: GroupedConvTile) -> Tensor:
    """The convolution."""
    return _launch_conv(x, weight.contiguous(memory_format=torch.channels_last), config)


def input_gradient(dy: Tensor, weight: Tensor, config: GroupedConvTile) -> Tensor:
    """The input gradient: the convolution of dy with transposed and flipped filters."""
    filters = weight.contiguous(memory_format=torch.channels_last)
    transposed = torch.empty_like(filters)
    grid, constants = (-(-filters.numel() // _FILTERS),), {"SIZE": filters.shape[1], "BLOCK": _FILTERS}
    launch(device.transpose_filters, grid, filters, transposed, filters.numel(), num_warps=_FILTER_WARPS, **constants)
    return _launch_conv(dy, transposed, config)


def _launch_conv(x: Tensor, filters: Tensor, config: GroupedConvTile) -> Tensor:
    """The convolution with filters that are channels_last."""
    samples, channels, height, width = x.shape
    y = torch.empty_like(x)
    lines, blocks = -(-height // config.parts), channels // _BLOCK
    strips, parts = -(-samples * width // config.columns), -(-height // lines)
    grid = (-(-blocks // config.blocks) * parts * strips,)  # one axis: the others are limited to 65535
    launch(
        device.conv, grid, x, filters, y, samples * width, blocks, height, width, lines,
        **_constants(config, filters.shape[1]),
    )  # fmt: skip
    return y


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, config: GroupedGradientTile) -> Tensor:
    """The weight gradient in the weight's dtype, channels_last."""
    samples, channels, height, width = x.shape
    size = weight.shape[1]
    blocks = -(-channels // _BLOCK * max(1, size // _BLOCK) // config.blocks)
    strips, num_sms = -(-samples * width // config.columns), channel_rows(x, (samples,)).num_sms
    strips_each = -(-strips // max(1, config.programs_per_sm * num_sms // blocks))
    splits = -(-strips // strips_each)
    partials = torch.empty(splits, channels, 3, 3, size, dtype=torch.float32, device=x.device)
    dweight = torch.empty_like(weight.contiguous(memory_format=torch.channels_last))
    launch(
        device.weight_gradient, (blocks * splits,), x, dy, partials, samples * width, channels // _BLOCK, height, width,
        strips_each, **_constants(config, size),
    )  # fmt: skip
    return add_partials(partials, dweight)


def _constants(config: GroupedConvTile | GroupedGradientTile, size: int) -> dict[str, int]:
    tile = {"COLUMNS": config.columns, "BLOCKS": config.blocks, "AHEAD": config.ahead, "SIZE": size}
    tile |= {"num_warps": config.blocks}
    return tile if config.registers is None else tile | {"maxnreg": config.registers}
