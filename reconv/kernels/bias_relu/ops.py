"""ReLU of a convolution's output plus its bias, for two uses; and the sum over each channel, a bias's gradient.

Computed by the batch norm kernels with mean 0 and variance 1: forward reads and writes the output once; backward adds
the gradients of both uses, masks them and sums the bias's gradient in one pass.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.batch_norm.ops import NormInput, gradient_sums, output_gradients, sum_groups, write_output
from reconv.kernels.channels_last import channel_rows


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
