"""Depthwise convolution with our own input gradient in place of cuDNN's.

Supports stride 1 or 2, an odd kernel padded by half of it, and one filter per channel. Values and gradients are those
of F.conv2d up to the order of sums.

On an H200, cuDNN's input gradient took 2.4 times as long as its forward pass over EfficientNet-B0's layers of stride 1
in bf16; the forward pass with flipped filters computes the same. At stride 2 it took 1.5 ms over MobileNetV2's four
layers at batch 256, where memory bandwidth allows 0.3 ms: there our kernel computes it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import channel_rows
from reconv.kernels.dispatch import supports
from reconv.kernels.jit.launch import launch

_SMALL, _VALUES = 3, {True: 2048, False: 1024}  # of a tile: larger kernels would run out of registers


def depthwise_conv(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """The depthwise convolution of x [n, channels, height, width] with weight [channels, 1, k, k]."""
    output: Tensor = _Depthwise.apply(x, weight, stride)  # type: ignore[no-untyped-call]
    return output


class _Depthwise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.stride = stride
        return _conv(x, weight, stride)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        wants_dx, wants_dweight, _ = ctx.needs_input_grad
        dx = None
        if wants_dx:
            dx = _conv(dy, weight.flip(2, 3), 1) if ctx.stride == 1 else _input_gradient_stride2(dy, weight, x)
        if not wants_dweight:
            return dx, None, None
        half = weight.shape[-1] // 2
        _, dweight, _ = torch.ops.aten.convolution_backward(
            *(dy, x, weight, None, [ctx.stride, ctx.stride], [half, half], [1, 1], False, [0, 0], len(weight)),
            [False, True, False],
        )
        return dx, dweight, None


def _conv(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    return F.conv2d(x, weight, stride=stride, padding=weight.shape[-1] // 2, groups=len(weight))


def _input_gradient_stride2(dy: Tensor, weight: Tensor, x: Tensor) -> Tensor:
    """The input gradient of a convolution of stride 2."""
    if not supports(dy):
        raise ValueError(f"kernels do not support {dy.dtype} {tuple(dy.shape)} on {dy.device}")
    from reconv.kernels.depthwise.triton import input_gradient

    dx = torch.empty_like(x)
    block = channel_rows(dy, (len(dy),)).block
    squares, num_squares = _VALUES[weight.shape[-1] <= _SMALL] // block, dy.numel() // dy.shape[1]
    grid = (-(-dy.shape[1] // block) * -(-num_squares // squares),)  # one axis: the others are limited to 65535
    sides = (*x.shape[2:], *dy.shape[2:])
    constants = {"K": weight.shape[-1], "SQUARES": squares, "BLOCK": block}
    launch(input_gradient, grid, dy, weight.contiguous(), dx, num_squares, dy.shape[1] // 8, *sides, **constants)
    return dx
