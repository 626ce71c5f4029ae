"""Depthwise convolutions, and the batch norm statistics of their output.

Supports stride 1 or 2, an odd kernel padded by half of it, one filter per channel, and a bias. Values and gradients
are those of F.conv2d up to the order of sums. In half precision kernels compute 3x3 and 5x5 convolutions, and 7x7 ones
of stride 1. For others all is left to cuDNN, but for the input gradient at stride 2.

On an H200 in bf16 at batch 256, cuDNN's passes at stride 1 took 1.5 to 4 times as long as memory bandwidth allows, and
its input gradient of MobileNetV2's four layers of stride 2 took 1.5 ms instead of 0.3 (benchmarks/LOG.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from reconv.kernels.channels_last import channel_rows, counters, split_tiles
from reconv.kernels.dispatch import CHANNEL_MULTIPLE, MAX_ELEMENTS, supports
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import NormParams
from reconv.kernels.ops.partial_sums import add_partials

_SMALL, _VALUES = 3, {True: 2048, False: 1024}  # of a tile: larger kernels would run out of registers
_WARP_THREADS = 32
_PIXELS = 4  # neighboring columns of a thread, where lines are no multiple of the configured number


@dataclass(frozen=True, slots=True)
class StripTile:
    """Neighboring columns and channels of a thread, warps of a program, and programs per SM."""

    pixels: int
    channels: int
    warps: int
    programs_per_sm: int


# By kernel and stride; measured on an H200 (benchmarks/LOG.md).
CONV = {
    (3, 1): StripTile(7, 2, 4, 4),
    (5, 1): StripTile(7, 2, 4, 4),
    (3, 2): StripTile(4, 2, 4, 4),
    (5, 2): StripTile(7, 2, 4, 2),
    (7, 1): StripTile(7, 1, 4, 3),  # not measured; 165 registers, and two channels would spill
}
WEIGHT_GRADIENT = {**CONV, (3, 2): StripTile(7, 2, 4, 2), (7, 1): StripTile(7, 1, 4, 2)}  # the last: 211 registers


def depthwise_conv(x: Tensor, weight: Tensor, stride: int = 1, bias: Tensor | None = None) -> Tensor:
    """The depthwise convolution of x [n, channels, height, width] with weight [channels, 1, k, k] and bias
    [channels]."""
    output: Tensor = _Depthwise.apply(x, weight, bias, stride)  # type: ignore[no-untyped-call]
    return output


def depthwise_conv_statistics(
    x: Tensor, weight: Tensor, stride: int, norm: NormParams, groups: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The convolution, and mean, unbiased variance and 1 / std [groups, 3, channels] of its output, where
    `supports_kernels` is true.

    The statistics have no gradient of their own: the norm's backward pass includes it.
    """
    output: tuple[Tensor, Tensor] = _DepthwiseStatistics.apply(  # type: ignore[no-untyped-call]
        x, weight, stride, norm, tuple(groups)
    )
    return output


def supports_kernels(x: Tensor, weight: Tensor, stride: int) -> bool:
    """True if kernels of ours compute the convolution of x, which `dispatch` supports, and its gradients."""
    return (
        (weight.shape[-1], stride) in CONV
        and x.dtype in (torch.bfloat16, torch.float16)
        and x.shape[1] % CHANNEL_MULTIPLE == 0
        and x.numel() <= MAX_ELEMENTS
        and supports(x)
    )


class _Depthwise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        if supports_kernels(x, weight, stride):
            return conv_output(x, weight, stride, CONV[weight.shape[-1], stride], bias=bias)
        return F.conv2d(x, weight, bias, stride=stride, padding=weight.shape[-1] // 2, groups=len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dbias = dy.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return *_gradients(dy, x, weight, ctx.stride, *ctx.needs_input_grad[:2]), dbias, None


class _DepthwiseStatistics(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, stride: int, norm: NormParams, groups: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        y, stats = conv_and_statistics(x, weight, stride, norm, groups, CONV[weight.shape[-1], stride])
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, stats

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        return *_gradients(dy, x, weight, ctx.stride, *ctx.needs_input_grad[:2]), None, None, None


def _gradients(
    dy: Tensor, x: Tensor, weight: Tensor, stride: int, wants_dx: bool, wants_dweight: bool
) -> tuple[Tensor | None, Tensor | None]:
    dy = dy.contiguous(memory_format=torch.channels_last)
    kernel, has_kernels = weight.shape[-1], supports_kernels(x, weight, stride)
    dx = dweight = None
    if wants_dx and stride == 2:
        dx = _input_gradient_stride2(dy, weight, x)
    elif wants_dx and has_kernels:
        dx = conv_output(dy, weight, 1, CONV[kernel, 1], flip=True)
    elif wants_dx:
        dx = F.conv2d(dy, weight.flip(2, 3), padding=kernel // 2, groups=len(weight))
    if wants_dweight and has_kernels:
        dweight = weight_gradient(dy, x, weight, stride, WEIGHT_GRADIENT[kernel, stride])
    elif wants_dweight:
        _, dweight, _ = torch.ops.aten.convolution_backward(
            *(dy, x, weight, None, [stride] * 2, [kernel // 2] * 2, [1, 1], False, [0, 0], len(weight)),
            [False, True, False],
        )
    return dx, dweight


def conv_output(
    x: Tensor, weight: Tensor, stride: int, config: StripTile, *, flip: bool = False, bias: Tensor | None = None
) -> Tensor:
    """The convolution with filters that are flipped or not."""
    y = _empty_output(x, stride)
    grid, tiles, constants = _strips(x, weight, stride, (len(x),), config)
    numbers = (len(x), len(x), *x.shape[2:], tiles, x.shape[1] // 8, 0.0)
    unused = (y,) * 4  # what statistics need
    filters = weight.contiguous()
    tensors = (x, filters, filters if bias is None else bias, y, *unused)
    constants |= {"FLIP": flip, "BIAS": bias is not None, "STATISTICS": False}
    launch(_conv_kernel(), grid, *tensors, *numbers, **constants)
    return y


def conv_and_statistics(
    x: Tensor, weight: Tensor, stride: int, norm: NormParams, groups: Sequence[int], config: StripTile
) -> tuple[Tensor, Tensor]:
    """The convolution and the statistics of its output."""
    y = _empty_output(x, stride)
    grid, tiles, constants = _strips(x, weight, stride, groups, config)
    num_groups, channels = len(groups), x.shape[1]
    stats = torch.empty(num_groups, 3, channels, dtype=torch.float32, device=x.device)
    partials = torch.empty(num_groups * grid[1] * 2 * channels, dtype=torch.float32, device=x.device)
    filters = weight.contiguous()
    launch(
        _conv_kernel(), grid,
        x, filters, filters, y, norm.running_var, stats, partials, counters(grid[0] * num_groups, x.device), len(x),
        groups[0], *x.shape[2:], tiles, channels // 8, norm.eps, FLIP=False, BIAS=False, STATISTICS=True, **constants,
    )  # fmt: skip
    return y, stats


def weight_gradient(dy: Tensor, x: Tensor, weight: Tensor, stride: int, config: StripTile) -> Tensor:
    """The gradient of the filters."""
    from reconv.kernels.triton.depthwise import weight_gradient

    grid, tiles, constants = _strips(x, weight, stride, (len(x),), config)
    partials = torch.empty(grid[1], *weight.shape, dtype=torch.float32, device=x.device)
    launch(weight_gradient, grid[:2], x, dy, partials, len(x), *x.shape[2:], tiles, x.shape[1] // 8, **constants)
    return add_partials(partials, torch.empty(weight.shape, dtype=weight.dtype, device=weight.device))


def _empty_output(x: Tensor, stride: int) -> Tensor:
    samples, channels = x.shape[:2]
    height, width = (-(-side // stride) for side in x.shape[2:])
    return torch.empty(samples, height, width, channels, dtype=x.dtype, device=x.device).permute(0, 3, 1, 2)


def _conv_kernel() -> Any:
    from reconv.kernels.triton.depthwise import conv

    return conv


def _strips(
    x: Tensor, weight: Tensor, stride: int, groups: Sequence[int], config: StripTile
) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """The grid of kernels that walk down strips of columns, the tiles of a program, and its constants."""
    height, width = (-(-side // stride) for side in x.shape[2:])
    rows = channel_rows(x, groups)
    pixels = config.pixels if width % config.pixels == 0 else _PIXELS
    lanes = config.warps * _WARP_THREADS * config.channels // rows.block
    num_tiles = -(-max(groups) * -(-width // pixels) // lanes) * height
    splits, tiles = split_tiles(x, groups, num_tiles, config.programs_per_sm, rows.num_blocks)
    constants = {"WHOLE": width % pixels == 0, "EVEN": x.shape[2] % stride == 0, "STRIDE": stride}
    constants |= {"K": weight.shape[-1], "PIXELS": pixels, "GROUPS": lanes, "BLOCK": rows.block}
    constants |= {"num_warps": config.warps}
    return (rows.num_blocks, splits, len(groups)), tiles, constants


def _input_gradient_stride2(dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """The input gradient of a convolution of stride 2."""
    if not supports(dy):
        raise ValueError(f"kernels do not support {dy.dtype} {tuple(dy.shape)} on {dy.device}")
    from reconv.kernels.triton.depthwise import input_gradient

    dx = torch.empty_like(x)
    block = channel_rows(dy, (len(dy),)).block
    squares, num_squares = _VALUES[weight.shape[-1] <= _SMALL] // block, dy.numel() // dy.shape[1]
    grid = (-(-dy.shape[1] // block) * -(-num_squares // squares),)  # one axis: the others are limited to 65535
    sides = (*x.shape[2:], *dy.shape[2:])
    constants = {"K": weight.shape[-1], "SQUARES": squares, "BLOCK": block}
    launch(input_gradient, grid, dy, weight.contiguous(), dx, num_squares, dy.shape[1] // 8, *sides, **constants)
    return dx
