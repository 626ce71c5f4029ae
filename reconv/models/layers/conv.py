"""Convolutions and pools that torch does not have: TensorFlow's SAME padding, and the fused forms of a stem and a pool.

Owns the choice of those forms. Refuses to know networks. Invariant: with SAME the output side is
ceil(input side / stride).
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from reconv.kernels import dispatch as fused
from reconv.kernels.window import PoolWindow, same_padding


def _pad(x: Tensor, kernel: int, stride: int, value: float) -> Tensor:
    top, bottom = same_padding(x.shape[-2], kernel, stride)
    left, right = same_padding(x.shape[-1], kernel, stride)
    return F.pad(x, (left, right, top, bottom), value=value)


class StemConv2d(nn.Conv2d):
    """A convolution of stride 2 over few channels, which kernels may compute in training over blocks of 2x2 pixels."""

    def __init__(self, in_channels: int, out_channels: int, kernel: int) -> None:
        super().__init__(in_channels, out_channels, kernel, 2, kernel // 2, bias=False)
        self.fused = False  # whether kernels compute it in training, where they take its images

    def forward(self, images: Tensor) -> Tensor:
        if self.fused and self.training and fused.reachable(images):
            from reconv.kernels.stem.ops import accepts, stem_images, stem_weight

            if accepts(images, self.weight):
                blocks = stem_images(images, self.kernel_size[0], fused.product_dtype(images))
                return F.conv2d(blocks, stem_weight(self.weight))
        return super().forward(images)


class DepthwiseConv2d(nn.Conv2d):
    """One odd filter for each channel, whose input's gradient need not be cuDNN's."""

    def __init__(self, channels: int, kernel: int, stride: int) -> None:
        super().__init__(channels, channels, kernel, stride, kernel // 2, groups=channels, bias=False)
        self.fused = False  # whether it is ours in training, on images that kernels take

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and self.training and fused.available(x):
            from reconv.kernels.depthwise.ops import depthwise

            dtype = fused.product_dtype(x)
            return depthwise(x.to(dtype), self.weight.to(dtype), self.stride[0])
        return super().forward(x)


class MaxPool2d(nn.MaxPool2d):
    """torch's max-pool, which kernels may compute in training."""

    def __init__(self, kernel: int, stride: int, padding: int = 0, ceil: bool = False) -> None:
        super().__init__(kernel, stride, padding, ceil_mode=ceil)
        self.fused = False  # whether kernels compute it in training, where they take its images
        self.window = PoolWindow(kernel, stride, padding, ceil)

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and self.training and fused.available(x):
            from reconv.kernels.max_pool.ops import accepts, max_pool

            if accepts(x, self.window):
                return max_pool(x, self.window)
        out: Tensor = super().forward(x)
        return out


class SameConv2d(nn.Conv2d):
    """A convolution that pads as TensorFlow's SAME does, by the size of each input."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.padded(x))

    def padded(self, x: Tensor) -> Tensor:
        """The images with the zeros that each side needs."""
        return _pad(x, self.kernel_size[0], self.stride[0], 0.0)


def without_bias(conv: nn.Conv2d, x: Tensor) -> Tensor:
    """A convolution's output before its bias is added."""
    x = conv.padded(x) if isinstance(conv, SameConv2d) else x
    out: Tensor = conv._conv_forward(x, conv.weight, None)
    return out


class SameMaxPool2d(nn.Module):
    """A max-pool that pads as TensorFlow's SAME does, which kernels may compute in training; padding never wins."""

    def __init__(self, kernel: int, stride: int) -> None:
        super().__init__()
        self.fused = False  # whether kernels compute it in training, where they take its images
        self.window = PoolWindow(kernel, stride, "same")

    def forward(self, x: Tensor) -> Tensor:
        if self.fused and self.training and fused.available(x):
            from reconv.kernels.max_pool.ops import accepts, max_pool

            if accepts(x, self.window):
                return max_pool(x, self.window)
        kernel, stride = self.window.side, self.window.stride
        return F.max_pool2d(_pad(x, kernel, stride, float("-inf")), kernel, stride)
