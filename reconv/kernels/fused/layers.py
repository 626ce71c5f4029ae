"""Convolutions, max-pools and squeeze-and-excitation that kernels compute in training, where they support the input.

Each class adds no state to the layer it derives from.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.kernels import dispatch
from reconv.kernels.fused.plain_layers import ACTIVATIONS, has_hooks, is_fusible_act
from reconv.kernels.jit.launch import is_traced
from reconv.kernels.window import MAX_STEM_CHANNELS, STEM_KERNELS, PoolWindow
from reconv.models.layers.conv import SameMaxPool2d, SqueezeExcitation
from reconv.models.layers.dropout import Dropout, to_int64

if TYPE_CHECKING:
    from reconv.kernels.ops.batch_norm import NormParams

_GROUP_SIZES = (4, 8, 16, 32)  # channels per group of `kernels/ops/grouped_conv.py`


class FusedStemConv2d(nn.Conv2d):
    """A convolution of stride 2 over few channels, computed over blocks of 2x2 pixels."""

    def forward(self, x: Tensor) -> Tensor:
        if self._supports_blocks(x):
            return F.conv2d(*self._blocks_and_filters(x))
        return super().forward(x)

    def supports_statistics(self, x: Tensor, groups: Sequence[int]) -> bool:
        """True if a kernel computes the convolution of these images with the statistics of its output."""
        if not self._supports_blocks(x) or len(x) != sum(groups):
            return False
        from reconv.kernels.ops.stem import supports_statistics

        return supports_statistics(x, self.weight, dispatch.conv_output_dtype(x))

    def forward_statistics(self, x: Tensor, norm: NormParams, groups: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The output and its statistics, where `supports_statistics` is true."""
        from reconv.kernels.ops.stem import stem_conv_statistics

        return stem_conv_statistics(*self._blocks_and_filters(x), norm, groups)

    def forward_norm_relu_pool(
        self, x: Tensor, norm: NormParams, groups: Sequence[int], window: PoolWindow
    ) -> tuple[Tensor, Tensor, Tensor]:
        """max_pool(relu(norm(output))), twice, and the statistics of the output, where `supports_statistics` is
        true."""
        from reconv.kernels.ops.stem_max_pool import stem_conv_norm_relu_max_pool

        return stem_conv_norm_relu_max_pool(*self._blocks_and_filters(x), norm, groups, window)

    def _supports_blocks(self, x: Tensor) -> bool:
        """True if the convolution of these images can be computed over blocks."""
        if not (self.training and x.dim() == 4 and dispatch.supports_device(x)):
            return False
        from reconv.kernels.ops.stem import supports

        return supports(x, self.weight)

    def _blocks_and_filters(self, x: Tensor) -> tuple[Tensor, Tensor]:
        from reconv.kernels.ops.stem import space_to_depth, space_to_depth_weight

        blocks = space_to_depth(x, self.kernel_size[0], dispatch.conv_output_dtype(x))
        return blocks, space_to_depth_weight(self.weight)


class FusedDepthwiseConv2d(nn.Conv2d):
    """A depthwise convolution that is not, or not all of it, left to cuDNN."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and dispatch.supports(x):
            from reconv.kernels.ops.depthwise import depthwise_conv

            dtype = dispatch.conv_output_dtype(x)
            bias = None if self.bias is None else self.bias.to(dtype)
            return depthwise_conv(x.to(dtype), self.weight.to(dtype), self.stride[0], bias)
        return super().forward(x)

    def forward_statistics(self, x: Tensor, norm: NormParams, groups: Sequence[int]) -> tuple[Tensor, Tensor] | None:
        """The output and its statistics; None where separate kernels compute them."""
        is_supported = self.training and dispatch.supports(x) and self.bias is None
        if not is_supported or len(x) != sum(groups):
            return None
        from reconv.kernels.ops.depthwise import depthwise_conv_statistics, supports_kernels

        dtype = dispatch.conv_output_dtype(x)
        x, weight = x.to(dtype), self.weight.to(dtype)
        stride = self.stride[0]
        return (
            depthwise_conv_statistics(x, weight, stride, norm, groups) if supports_kernels(x, weight, stride) else None
        )


class FusedGroupedConv2d(nn.Conv2d):
    """A grouped 3x3 convolution of stride 1 and few channels per group, not left to cuDNN."""

    def forward(self, x: Tensor) -> Tensor:
        if self.training and dispatch.supports(x):
            from reconv.kernels.ops.grouped_conv import grouped_conv, supports

            dtype = dispatch.conv_output_dtype(x)
            if supports(x, self.weight, dtype):
                return grouped_conv(x.to(dtype), self.weight.to(dtype))
        return super().forward(x)


def fused_conv_class(conv: nn.Conv2d) -> type[nn.Conv2d] | None:
    """The fused class of a convolution, or None. Of those with a bias only depthwise ones have one."""
    kernel, stride = conv.kernel_size[0], conv.stride[0]
    is_square = conv.kernel_size == (kernel, kernel) and conv.stride == (stride, stride)
    is_centered = conv.padding == (kernel // 2, kernel // 2) and kernel % 2 == 1 and conv.dilation == (1, 1)
    if type(conv) is not nn.Conv2d or not (is_square and is_centered):
        return None
    is_depthwise = conv.in_channels == conv.out_channels == conv.groups
    if stride <= 2 and kernel > 1 and is_depthwise and conv.groups > 1:
        return FusedDepthwiseConv2d
    if conv.bias is not None:
        return None
    if kernel in STEM_KERNELS and (stride, conv.groups) == (2, 1) and conv.in_channels <= MAX_STEM_CHANNELS:
        return FusedStemConv2d
    size = conv.in_channels // conv.groups
    if (
        (kernel, stride) == (3, 1)
        and conv.in_channels == conv.out_channels
        and conv.groups > 1
        and size in _GROUP_SIZES
    ):
        return FusedGroupedConv2d
    return None


def pool_window(pool: nn.Module) -> PoolWindow | None:
    """The window of a max-pool; None for other layers and for windows that kernels do not know."""
    if isinstance(pool, SameMaxPool2d):
        return PoolWindow(pool.kernel_size, pool.stride, "same")
    if not isinstance(pool, nn.MaxPool2d) or pool.dilation != 1 or pool.return_indices:
        return None
    kernel, stride, padding = pool.kernel_size, pool.stride, pool.padding
    if not (isinstance(kernel, int) and isinstance(stride, int) and isinstance(padding, int)):
        return None
    return PoolWindow(kernel, stride, padding, pool.ceil_mode)


class FusedMaxPool2d(nn.MaxPool2d):
    """A max-pool computed by kernels."""

    def forward(self, x: Tensor) -> Tensor:
        y = _max_pool(self, x)
        out: Tensor = super().forward(x) if y is None else y
        return out


class FusedSameMaxPool2d(SameMaxPool2d):
    """A max-pool with SAME padding computed by kernels."""

    def forward(self, x: Tensor) -> Tensor:
        y = _max_pool(self, x)
        return super().forward(x) if y is None else y


def _max_pool(pool: nn.Module, x: Tensor) -> Tensor | None:
    """The pooled images, or None where kernels do not support them."""
    window = pool_window(pool)
    if window is None or not (pool.training and dispatch.supports(x)):
        return None
    from reconv.kernels.ops.max_pool import max_pool, supports

    return max_pool(x, window) if supports(x, window) else None


def max_pool_and_input(pool: nn.Module, x: Tensor) -> tuple[Tensor, Tensor]:
    """pool(x), and x for one more use, whose gradient the pool's backward kernel adds if it supports the pool."""
    window = pool_window(pool)
    if window is not None and pool.training and dispatch.supports(x):
        from reconv.kernels.ops import max_pool as ops

        if ops.supports(x, window):
            return ops.max_pool_and_input(x, window)
    return pool(x), x


class FusedDropout(Dropout):
    """Dropout by one kernel, with the same bits."""

    def forward(self, x: Tensor) -> Tensor:
        keys = self.sample_keys
        if keys is None and is_traced(x):
            keys = torch.empty(len(x), dtype=torch.int64, device="meta")  # as in training
        if self.training and self.rate > 0 and keys is not None and dispatch.supports_device(x):
            from reconv.kernels.ops import dropout as ops

            if ops.supports(x, keys):
                return ops.keyed_dropout(x, keys + to_int64(self.key), self.rate)
        return super().forward(x)


class SqueezeExciteKernels(nn.Module):
    """Squeeze-and-excitation whose passes over the images are computed by kernels.

    Its names must not be those of children in other packages' classes.
    """

    def gate_of_means(self, means: Tensor) -> Tensor:
        """The factors for channels of these means, both [n, channels, 1, 1]."""
        raise NotImplementedError

    def supports_kernels(self, x: Tensor) -> bool:
        """True if kernels compute the passes over these images."""
        return self.training and dispatch.supports(x)

    def forward_kernels(self, x: Tensor) -> Tensor:
        """x times its gate, computed by the kernels."""
        from reconv.kernels.ops.squeeze_excite import squeeze_excite

        return squeeze_excite(x, self.gate_of_means)


class FusedSqueezeExcitation(SqueezeExciteKernels, SqueezeExcitation):
    """The layer of our models."""

    def forward(self, x: Tensor) -> Tensor:
        return self.forward_kernels(x) if self.supports_kernels(x) else super().forward(x)

    def gate_of_means(self, means: Tensor) -> Tensor:
        gate = excitation_gate(means, self.fc1, self.activation, self.fc2)
        return self.gate(means) if gate is None else gate


def excitation_gate(means: Tensor, fc1: nn.Module, act: nn.Module, fc2: nn.Module) -> Tensor | None:
    """sigmoid(fc2(act(fc1(means)))); None where separate kernels compute it."""
    if not (_is_conv1x1_with_bias(fc1) and is_fusible_act(act) and _is_conv1x1_with_bias(fc2)):
        return None
    if not dispatch.supports_device(means) or dispatch.conv_output_dtype(means) != means.dtype:
        return None
    from reconv.kernels.ops import excitation as ops

    assert isinstance(fc1, nn.Conv2d) and isinstance(fc2, nn.Conv2d) and fc1.bias is not None and fc2.bias is not None
    if not ops.supports(means, fc1.weight, fc2.weight):
        return None
    weight1, weight2 = fc1.weight.to(means.dtype), fc2.weight.to(means.dtype)
    return ops.excitation_gate(means, weight1, fc1.bias, weight2, fc2.bias, ACTIVATIONS[type(act)])


def _is_conv1x1_with_bias(layer: nn.Module) -> bool:
    """True if calling a layer is no more than a 1x1 convolution with bias, applied to one pixel."""
    return (
        type(layer) is nn.Conv2d
        and not has_hooks(layer)
        and (layer.kernel_size, layer.padding, layer.groups) == ((1, 1), (0, 0), 1)
        and layer.bias is not None
    )
