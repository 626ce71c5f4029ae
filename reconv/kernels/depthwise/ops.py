"""A depthwise convolution whose input's gradient is not left to cuDNN.

Owns the autograd function. Refuses to know modules. Limits: stride 1 or 2, an odd kernel, padding by half of it, one
filter a channel; at stride 2 tensors that `fused.available` accepts. Invariant: values and gradients are those of
`F.conv2d`, up to the order of additions.

On an H200 cuDNN's own gradient took 2.4 times as long as its forward pass, over EfficientNet-B0's layers of stride 1 in
bf16; with filters turned by half a circle the forward pass computes the same sums. At stride 2 it took 1.5 ms over
MobileNetV2's four layers at batch 256, where the bytes need 0.3: there a kernel of ours computes it.
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

_SMALL, _VALUES = 3, {True: 2048, False: 1024}  # of a tile: a large filter's threads would run out of registers


def depthwise_conv(x: Tensor, weight: Tensor, stride: int = 1) -> Tensor:
    """Each channel of images [n, channels, height, width] filtered by its own weights [channels, 1, k, k]."""
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
    """The gradient of the input of a convolution of stride 2."""
    if not supports(dy):
        raise ValueError(f"images that kernels take, not {dy.dtype} {tuple(dy.shape)} on {dy.device}")
    from reconv.kernels.depthwise.triton import input_gradient

    dx = torch.empty_like(x)
    block = channel_rows(dy, (len(dy),)).block
    squares, num_squares = _VALUES[weight.shape[-1] <= _SMALL] // block, dy.numel() // dy.shape[1]
    grid = (-(-dy.shape[1] // block) * -(-num_squares // squares),)  # one axis: there may be more than a second has
    sides = (*x.shape[2:], *dy.shape[2:])
    constants = {"K": weight.shape[-1], "SQUARES": squares, "BLOCK": block}
    launch(input_gradient, grid, dy, weight.contiguous(), dx, num_squares, dy.shape[1] // 8, *sides, **constants)
    return dx
