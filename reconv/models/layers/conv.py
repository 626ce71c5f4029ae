"""Convolution and pooling layers that torch does not have: TensorFlow's SAME padding, conv-norm-activation, and
squeeze-and-excitation."""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Activation = Literal["relu", "relu6", "silu"]
_ACTIVATIONS: dict[Activation, type[nn.ReLU | nn.ReLU6 | nn.SiLU]] = {
    "relu": nn.ReLU,
    "relu6": nn.ReLU6,
    "silu": nn.SiLU,
}


def make_activation(name: Activation) -> nn.Module:
    """A new in-place activation layer."""
    return _ACTIVATIONS[name](inplace=True)


def same_padding(side: int, kernel: int, stride: int) -> tuple[int, int]:
    """Pixels that SAME adds before and after one side of an image; of an odd total, one more after."""
    total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
    return total // 2, total - total // 2


def _pad_same(x: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    top, bottom = same_padding(x.shape[-2], kernel, stride)
    left, right = same_padding(x.shape[-1], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value)


class SameConv2d(nn.Conv2d):
    """A convolution with TensorFlow's SAME padding: the output side is ceil(input side / stride)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.pad(x))

    def pad(self, x: Tensor) -> Tensor:
        """The input with the zeros that SAME adds."""
        return _pad_same(x, self.kernel_size[0], self.stride[0], 0.0)


class SameMaxPool2d(nn.Module):
    """A max-pool with TensorFlow's SAME padding; padding never is the maximum."""

    def __init__(self, kernel_size: int, stride: int) -> None:
        super().__init__()
        self.kernel_size = kernel_size
        self.stride = stride

    def forward(self, x: Tensor) -> Tensor:
        return F.max_pool2d(_pad_same(x, self.kernel_size, self.stride, float("-inf")), self.kernel_size, self.stride)


class ConvNormAct(nn.Sequential):
    """A convolution, its norm and an activation, which is nn.Identity where there is none."""

    def __init__(self, conv: nn.Conv2d, norm: nn.Module, act: nn.Module) -> None:
        super().__init__(conv, norm, act)


class SqueezeExcitation(nn.Module):
    """Channels scaled by a gate that a small network computes from their means (Hu et al., 2017)."""

    def __init__(self, channels: int, squeeze_channels: int, activation: nn.Module) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeeze_channels, 1)
        self.fc2 = nn.Conv2d(squeeze_channels, channels, 1)
        self.activation = activation

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gate(x.mean((2, 3), keepdim=True))

    def gate(self, means: Tensor) -> Tensor:
        """The factors for channels of these means, both [n, channels, 1, 1]."""
        return torch.sigmoid(self.fc2(self.activation(self.fc1(means))))
