"""1x1 convolutions fused with the norm before or after them, and stems, like the functions of `fused_norm`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import Tensor, nn

from reconv.kernels import dispatch
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.fused.layers import FusedDepthwiseConv2d, FusedStemConv2d
from reconv.kernels.fused.norm import FusedBatchNorm2d, norm_act
from reconv.kernels.fused.plain_layers import ACTIVATIONS, has_hooks

if TYPE_CHECKING:
    from reconv.kernels.ops.batch_norm import NormParams


def conv_norm_act(conv: nn.Module, norm: nn.Module, x: Tensor, act: nn.Module) -> Tensor:
    """act(norm(conv(x)))"""
    y, stats = conv_statistics(conv, norm, x)
    return norm_act(norm, y, act, stats)


def conv_statistics(conv: nn.Module, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """conv(x), and its statistics for the norm after it where one kernel computes both."""
    if isinstance(norm, FusedBatchNorm2d) and is_plain_conv1x1(conv) and norm.supports(x):
        assert isinstance(conv, nn.Conv2d)
        result = conv1x1_statistics(x, conv.weight, norm.norm_params(), norm.group_sizes(x))
        if result is not None:
            return result
    if isinstance(norm, FusedBatchNorm2d) and isinstance(conv, FusedDepthwiseConv2d) and norm.supports(x):
        result = None if has_hooks(conv) else conv.forward_statistics(x, norm.norm_params(), norm.group_sizes(x))
        if result is not None:
            return result
    if isinstance(norm, FusedBatchNorm2d) and isinstance(conv, FusedStemConv2d) and supports_stem(conv, norm, x):
        return conv.forward_statistics(x, norm.norm_params(), norm.group_sizes(x))
    return conv(x), None


def conv_output(conv: nn.Module, norm: nn.Module, x: Tensor) -> ConvOutput:
    """conv(x), to be normalized by `norm` and used for nothing else."""
    if isinstance(norm, FusedBatchNorm2d) and supports_backward(conv, norm, x, has_norm=False):
        from reconv.kernels.ops.conv1x1_norm_backward import conv1x1_before_norm

        assert isinstance(conv, nn.Conv2d)
        return conv1x1_before_norm(x, conv.weight.to(x.dtype), norm.norm_params(), norm.group_sizes(x))
    return ConvOutput(*conv_statistics(conv, norm, x))


def norm_act_conv_output(
    norm: nn.Module, x: Tensor, act: nn.Module, conv: nn.Module, next_norm: nn.Module
) -> ConvOutput:
    """conv(act(norm(x))), to be normalized by `next_norm` and used for nothing else."""
    if isinstance(norm, FusedBatchNorm2d) and isinstance(next_norm, FusedBatchNorm2d) and type(act) is nn.ReLU:
        is_same = norm.groups == next_norm.groups and norm.supports(x)
        if is_same and isinstance(conv, nn.Conv2d) and supports_backward(conv, next_norm, x, has_norm=True):
            from reconv.kernels.ops.conv1x1_norm_backward import norm_relu_conv1x1_before_norm

            result, statistics = norm_relu_conv1x1_before_norm(
                x, norm.norm_params(), conv.weight.to(x.dtype), next_norm.norm_params(), norm.group_sizes(x)
            )
            norm.record(statistics)
            return result
    return conv_output(conv, next_norm, norm_act(norm, x, act))


def supports_backward(conv: nn.Module, norm: FusedBatchNorm2d, x: Tensor, *, has_norm: bool) -> bool:
    """True if kernels compute the backward pass of conv(x) and the norm behind it as one; x may have a norm itself."""
    if not (is_plain_conv1x1(conv) and norm.supports(x)):
        return False
    if x.dtype != dispatch.conv_output_dtype(x) or len(x) != sum(norm.group_sizes(x)):
        return False
    from reconv.kernels.ops.conv1x1_norm_backward import supports

    assert isinstance(conv, nn.Conv2d)
    return supports(x, conv.weight, has_norm)


def supports_stem(conv: FusedStemConv2d, norm: FusedBatchNorm2d, x: Tensor) -> bool:
    """True if a kernel computes a stem's convolution with the statistics for the norm after it."""
    return norm.supports() and not has_hooks(conv) and conv.supports_statistics(x, norm.group_sizes(x))


def conv1x1_statistics(
    x: Tensor, weight: Tensor, norm: NormParams, groups: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """A 1x1 convolution and the statistics of its output; None where separate kernels compute them."""
    from reconv.kernels.ops import conv1x1_statistics as ops

    if x.dtype != dispatch.conv_output_dtype(x) or len(x) != sum(groups) or not ops.supports(x, weight):
        return None
    return ops.conv1x1_statistics(x, weight.to(x.dtype), norm, groups)


def is_plain_conv1x1(conv: nn.Module) -> bool:
    """True if calling a layer is no more than a 1x1 convolution of stride 1 without bias."""
    return (
        type(conv) is nn.Conv2d
        and not has_hooks(conv)
        and (conv.kernel_size, conv.stride, conv.padding) == ((1, 1), (1, 1), (0, 0))
        and conv.groups == 1
        and conv.bias is None
    )


def conv1x1_norm_act(conv: nn.Module, norm: nn.Module, x: Tensor, act: nn.Module) -> Tensor:
    """act(norm(conv(x))), as one operation if the convolution is a 1x1 expansion."""
    name = ACTIVATIONS.get(type(act))
    if name is not None and isinstance(norm, FusedBatchNorm2d) and supports_expansion(conv, norm, x):
        from reconv.kernels.ops.conv1x1_norm_act import conv1x1_batch_norm_act

        assert isinstance(conv, nn.Conv2d)
        filters = conv.weight.to(x.dtype)
        y, statistics = conv1x1_batch_norm_act(x, filters, norm.norm_params(), norm.group_sizes(x), name)
        norm.record(statistics)
        return y
    return conv_norm_act(conv, norm, x, act)


def supports_expansion(conv: nn.Module, norm: FusedBatchNorm2d, x: Tensor) -> bool:
    """True if kernels compute the convolution of x, this norm and an activation as one."""
    if type(conv) is not nn.Conv2d or has_hooks(conv) or not norm.supports(x):
        return False
    is_plain = (conv.stride, conv.padding, conv.groups, conv.bias) == ((1, 1), (0, 0), 1, None)
    if not is_plain or dispatch.conv_output_dtype(x) != x.dtype:
        return False
    from reconv.kernels.ops.conv1x1_norm_act import supports

    return supports(x, conv.weight)


def norm_act_conv1x1(
    norm: nn.Module, x: Tensor, act: nn.Module, conv: nn.Module, stats: Tensor | None = None
) -> Tensor:
    """conv(act(norm(x))); `stats` are x's statistics, if they are known."""
    name = ACTIVATIONS.get(type(act))
    if name is not None and isinstance(norm, FusedBatchNorm2d) and supports_conv1x1(norm, conv, x):
        from reconv.kernels.ops.norm_conv1x1 import batch_norm_act_conv1x1

        assert isinstance(conv, nn.Conv2d)
        filters = conv.weight.to(x.dtype)
        y, statistics = batch_norm_act_conv1x1(x, norm.norm_params(), filters, norm.group_sizes(x), name, stats)
        norm.record(statistics)
        return y
    out: Tensor = conv(norm_act(norm, x, act, stats))
    return out


def supports_conv1x1(norm: FusedBatchNorm2d, conv: nn.Module, x: Tensor) -> bool:
    """True if kernels compute this norm of x, an activation and the convolution as one."""
    if not (isinstance(conv, nn.Conv2d) and conv.stride == (1, 1) and conv.bias is None and norm.supports(x)):
        return False
    from reconv.kernels.ops.norm_conv1x1 import supports

    return supports(x, conv.weight)
