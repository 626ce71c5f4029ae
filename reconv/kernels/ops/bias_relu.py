"""ReLU of a convolution's output plus its bias, for two uses or padded; and the sum over each channel, a bias gradient.

Without padding it is computed by the batch norm kernels with mean 0 and variance 1: forward reads and writes the output
once; backward adds the gradients of both uses, masks them and sums the bias's gradient in one pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import channel_rows, counters
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import (
    CONFIGS,
    NormInput,
    gradient_sums,
    output_gradients,
    sum_groups,
    tile_constants,
    write_output,
)
from reconv.kernels.triton import bias_relu as device

Padding = tuple[int, int, int, int]  # pixels left, right, above and below, as F.pad takes them


def bias_relu(x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
    """relu(x + bias), twice, of x [n, channels, height, width] and bias [channels]."""
    output: tuple[Tensor, Tensor] = _BiasReLU.apply(x, bias)  # type: ignore[no-untyped-call]
    return output


class _BiasReLU(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        y = write_output(_operand(x, bias), None, None, channel_rows(x, (len(x),)), "relu")
        ctx.save_for_backward(x, bias)
        ctx.set_materialize_grads(False)
        return y, y.detach()

    @staticmethod
    def backward(ctx: Any, first: Tensor | None, second: Tensor | None) -> tuple[Tensor, Tensor]:
        x, bias = ctx.saved_tensors
        gradient, gradient2 = output_gradients(first, second)
        dx, rows = torch.empty_like(x), channel_rows(x, (len(x),))
        sums = gradient_sums(gradient, gradient2, _operand(x, bias), None, None, dx, rows, "relu")
        return dx, sum_groups(sums[0], bias)


def bias_relu_pad(x: Tensor, bias: Tensor, padding: Padding) -> Tensor:
    """relu(x + bias) with zeros around it, of x [n, channels, height, width] and bias [channels]."""
    output: Tensor = _BiasReLUPad.apply(x, bias, padding)  # type: ignore[no-untyped-call]
    return output


class _BiasReLUPad(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor, padding: Padding) -> Tensor:
        (n, channels, height, width), (left, right, above, below) = x.shape, padding
        y = x.new_empty(n, height + above + below, width + left + right, channels).permute(0, 3, 1, 2)
        ctx.sizes = (height, width, *y.shape[2:], above, left)
        ctx.save_for_backward(x, bias)
        rows, config = channel_rows(y, (n,)), CONFIGS["batch_norm"]
        launch(
            device.bias_relu_pad, rows.grid(config), x, bias, y, channels // 8, rows.num_rows, *ctx.sizes,
            **tile_constants(rows, config),
        )  # fmt: skip
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        x, bias = ctx.saved_tensors
        gradient, dx = dy.contiguous(memory_format=torch.channels_last), torch.empty_like(x)
        rows, config = channel_rows(x, (len(x),)), CONFIGS["gradient_sums"]
        sums = torch.empty(rows.channels, dtype=torch.float32, device=x.device)
        partials = torch.empty(rows.splits(config) * rows.channels, dtype=torch.float32, device=x.device)
        launch(
            device.bias_relu_pad_gradient, rows.grid(config), gradient, x, bias, dx, sums, partials,
            counters(rows.num_counts, x.device), rows.channels // 8, rows.num_rows, *ctx.sizes,
            STAGES=rows.stages(config, gradient, x), **tile_constants(rows, config),
        )  # fmt: skip
        return dx, sums.to(bias.dtype), None


def channel_sums(x: Tensor) -> Tensor:
    """The sum of each channel of x [n, channels, height, width], in float32."""
    _, ones = _neutral(x.shape[1], x.device)
    sums = gradient_sums(x, None, _operand(x, ones), None, None, None, channel_rows(x, (len(x),)), "none")
    return sums[0, 0]


def _operand(x: Tensor, bias: Tensor) -> NormInput:
    stats, ones = _neutral(x.shape[1], x.device)
    return NormInput(x, stats, ones, bias)


@cache
def _neutral(channels: int, on: torch.device) -> tuple[Tensor, Tensor]:
    """Statistics that change nothing, and a weight of one."""
    stats = torch.ones(1, 3, channels, device=on)
    stats[:, 0] = 0.0
    return stats, torch.ones(channels, device=on)
