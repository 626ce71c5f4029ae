"""Convolutions and pools with TensorFlow's SAME padding, which torch does not have for strides above 1.

Owns the padding arithmetic. Refuses to know networks. Invariant: the output side is ceil(input side / stride), and
an odd total pads one more at the end than at the start.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


def same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels before and after, for one side of an image."""
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def _pad(x: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    top, bottom = same_padding(x.shape[-2], kernel, stride)
    left, right = same_padding(x.shape[-1], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value)


class SameConv2d(nn.Conv2d):
    """A convolution that pads as TensorFlow's SAME does, by the size of each input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_pad(x, self.kernel_size[0], self.stride[0], 0.0))


class SameMaxPool2d(nn.Module):
    """A max-pool that pads as TensorFlow's SAME does; padding never wins."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.kernel = kernel
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(_pad(x, self.kernel, self.stride, float("-inf")), self.kernel, self.stride)
