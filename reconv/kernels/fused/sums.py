"""Residual sums fused with the norms before them and the 1x1 convolution behind them, as in `fused_norm`.

A block output that two others read is a `DualUse`; one that the next block computes with its first convolution is a
`PendingSum`.

A block of ours returns its sum. Only a fused ResNet's own `features` passes a `PendingSum` from bottleneck to
bottleneck, and never past a block, layer or convolution with hooks (tests/kernels/test_fused_sum_conv1x1.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from reconv.kernels import dispatch
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.fused.conv1x1 import conv_output, conv_statistics, supports_stem
from reconv.kernels.fused.layers import FusedStemConv2d, SqueezeExciteKernels, pool_window
from reconv.kernels.fused.norm import (
    FusedBatchNorm2d,
    norm_act,
    supports_excite,
)
from reconv.kernels.fused.plain_layers import ACTIVATIONS, has_hooks
from reconv.kernels.reference import Activation
from reconv.kernels.window import STEM_WINDOWS, PoolWindow

_POOLED_STEM_KERNEL = (
    7,
    7,
)  # of stems computed with their pool: backward, that is slower than separate kernels for 3x3


class DualUse(NamedTuple):
    """A block output read by the main path and the shortcut; their gradients are summed inside the backward kernel."""

    main: Tensor
    shortcut: Tensor


def dual(x: Tensor | DualUse) -> DualUse:
    """The input of a block's main path and shortcut."""
    return x if isinstance(x, DualUse) else DualUse(x, x)


def single(x: Tensor | DualUse) -> Tensor:
    """The tensor itself, for a single consumer."""
    return x.main if isinstance(x, DualUse) else x


@dataclass(frozen=True, slots=True)
class PendingSum:
    """A residual sum, relu(norm(x) + other) or relu(norm(x) + other_norm(other)), that is not computed yet.

    The kernels support it. With a 1x1 convolution that reads it, it can be computed as one operation.
    """

    norm: FusedBatchNorm2d
    x: ConvOutput
    other: ConvOutput
    other_norm: FusedBatchNorm2d | None


def computed(x: Any) -> Any:
    """The sum, if x is one that is not computed yet; else x."""
    if not isinstance(x, PendingSum):
        return x
    return _add_norms(x.norm, x.x, x.other, x.other_norm, "relu")


def norm_add_act(
    norm: nn.Module,
    x: Tensor,
    shortcut: Tensor,
    downsample: nn.Module | None,
    act: nn.Module,
    stats: Tensor | None = None,
) -> Tensor | DualUse:
    """act(norm(x) + shortcut), where `downsample` matches the shortcut's shape to x; its norm is fused too.

    `stats` are x's statistics, if they are known.
    """
    out: Tensor | DualUse = computed(pending_norm_add_act(norm, ConvOutput(x, stats), shortcut, downsample, act))
    return out


def pending_norm_add_act(
    norm: nn.Module, x: ConvOutput, shortcut: Tensor, downsample: nn.Module | None, act: nn.Module
) -> Tensor | DualUse | PendingSum:
    """The same, but a sum that kernels can compute together with a convolution of it is left to be computed."""
    name = ACTIVATIONS.get(type(act))
    if isinstance(norm, FusedBatchNorm2d) and name in ("none", "relu") and norm.supports(x.y):
        other, other_norm = _before_norm(shortcut, downsample, norm)
        if norm.supports(other.y) and (other.y.shape, other.y.dtype) == (x.y.shape, x.y.dtype):
            if name == "relu":
                return PendingSum(norm, x, other, other_norm)
            return _add_norms(norm, x, other, other_norm, name)
        shortcut, downsample = other.y, other_norm
    y = norm(x.y)
    out: Tensor = act(y + (shortcut if downsample is None else downsample(shortcut)))
    return out


def norm_add_norm_act(
    norm: nn.Module, x: Tensor, other: Tensor, other_norm: nn.Module | None, act: nn.Module
) -> Tensor | DualUse:
    """act(norm(x) + other_norm(other)), or plus other."""
    name = ACTIVATIONS.get(type(act))
    is_same = (other.shape, other.dtype) == (x.shape, x.dtype)
    if isinstance(norm, FusedBatchNorm2d) and name in ("none", "relu") and is_same and norm.supports_batch(x, other):
        if other_norm is None:
            return _add_norms(norm, ConvOutput(x), ConvOutput(other), None, name)
        if isinstance(other_norm, FusedBatchNorm2d) and other_norm.supports(other) and other_norm.groups == norm.groups:
            return _add_norms(norm, ConvOutput(x), ConvOutput(other), other_norm, name)
    y = norm(x)
    out: Tensor = act(y + (other if other_norm is None else other_norm(other)))
    return out


def _before_norm(
    shortcut: Tensor, downsample: nn.Module | None, norm: FusedBatchNorm2d
) -> tuple[ConvOutput, FusedBatchNorm2d | None]:
    """The shortcut before the norm of its downsampling, and that norm if it can be fused with the sum."""
    if downsample is None:
        return ConvOutput(shortcut), None
    if isinstance(downsample, nn.Sequential) and len(downsample) == 2:
        conv, last = downsample
        if isinstance(last, FusedBatchNorm2d) and last.supports() and last.groups == norm.groups:
            return conv_output(conv, last, shortcut), last
    return ConvOutput(downsample(shortcut)), None


def _add_norms(
    norm: FusedBatchNorm2d, x: ConvOutput, other: ConvOutput, other_norm: FusedBatchNorm2d | None, act: Activation
) -> DualUse:
    from reconv.kernels.ops.batch_norm import batch_norm_add_act, batch_norm_add_norm_act

    params, groups = norm.norm_params(), norm.group_sizes(x.y)
    if other_norm is None:
        main, shortcut, statistics = batch_norm_add_act(x.y, params, other.y, groups, act, x.stats)
    else:
        other_params = other_norm.norm_params()
        main, shortcut, statistics, other_statistics = batch_norm_add_norm_act(
            x.y, params, other.y, other_params, groups, act, x.stats, other.stats
        )
        other_norm.record(other_statistics)
    norm.record(statistics)
    return DualUse(main, shortcut)


def conv_norm_act_pool(
    conv: nn.Module, norm: nn.Module, x: Tensor, act: nn.Module, pool: nn.Module
) -> Tensor | DualUse:
    """pool(act(norm(conv(x)))), as one operation if the convolution is a stem's."""
    window = _stem_window(act, pool)
    if (
        isinstance(conv, FusedStemConv2d)
        and conv.kernel_size == _POOLED_STEM_KERNEL
        and isinstance(norm, FusedBatchNorm2d)
        and window is not None
        and supports_stem(conv, norm, x)
    ):
        main, shortcut, statistics = conv.forward_norm_relu_pool(x, norm.norm_params(), norm.group_sizes(x), window)
        norm.record(statistics)
        return DualUse(main, shortcut)
    y, stats = conv_statistics(conv, norm, x)
    return norm_act_pool(norm, y, act, pool, stats)


def norm_act_pool(
    norm: nn.Module, x: Tensor, act: nn.Module, pool: nn.Module, stats: Tensor | None = None
) -> Tensor | DualUse:
    """pool(act(norm(x))); `stats` are x's statistics, if they are known."""
    window = _stem_window(act, pool)
    if isinstance(norm, FusedBatchNorm2d) and window is not None and norm.supports(x):
        from reconv.kernels.ops.norm_max_pool import batch_norm_relu_max_pool

        main, shortcut, statistics = batch_norm_relu_max_pool(x, norm.norm_params(), norm.group_sizes(x), window, stats)
        norm.record(statistics)
        return DualUse(main, shortcut)
    out: Tensor = pool(norm_act(norm, x, act, stats))
    return out


def _stem_window(act: nn.Module, pool: nn.Module) -> PoolWindow | None:
    """The pool's window, if kernels compute it with a norm and this activation."""
    window = pool_window(pool)
    return window if type(act) is nn.ReLU and window in STEM_WINDOWS else None


def conv1x1_dual(x: Tensor | DualUse | PendingSum, conv: nn.Module, norm: nn.Module) -> tuple[DualUse, Tensor | None]:
    """conv(x), and x for the shortcut; and the statistics of conv(x) for the norm after it where they are known."""
    if not isinstance(x, PendingSum) or not supports_sum_conv1x1(x, conv):
        main, shortcut = dual(computed(x))
        y, stats = conv_statistics(conv, norm, main)
        return DualUse(y, shortcut), stats
    from reconv.kernels.ops.sum_conv1x1 import batch_norm_add_relu_conv1x1

    assert isinstance(conv, nn.Conv2d)
    other_norm = None if x.other_norm is None else x.other_norm.norm_params()
    is_known = isinstance(norm, FusedBatchNorm2d) and norm.groups == x.norm.groups and norm.supports(x.x.y)
    y, shortcut, statistics, other_statistics, conv_stats = batch_norm_add_relu_conv1x1(
        x.x, x.norm.norm_params(), x.other, other_norm, conv.weight.to(x.x.y.dtype), x.norm.group_sizes(x.x.y),
        norm.norm_params() if isinstance(norm, FusedBatchNorm2d) and is_known else None,
    )  # fmt: skip
    x.norm.record(statistics)
    if x.other_norm is not None and other_statistics is not None:
        x.other_norm.record(other_statistics)
    return DualUse(y, shortcut), conv_stats


def supports_sum_conv1x1(x: PendingSum, conv: nn.Module) -> bool:
    """True if kernels compute this sum and the convolution as one; a convolution with hooks is called."""
    if type(conv) is not nn.Conv2d or has_hooks(conv) or dispatch.conv_output_dtype(x.x.y) != x.x.y.dtype:
        return False
    is_plain = (conv.stride, conv.padding, conv.groups, conv.bias) == ((1, 1), (0, 0), 1, None)
    if not is_plain or conv.padding_mode != "zeros":
        return False
    from reconv.kernels.ops.sum_conv1x1 import supports

    return supports(x.x.y, conv.weight)


def norm_squeeze_excite_add_relu(
    norm: nn.Module, x: Tensor, se: nn.Module, shortcut: Tensor, act: nn.Module, stats: Tensor | None = None
) -> Any:
    """act(se(norm(x)) + shortcut); `stats` are x's statistics, if they are known."""
    is_same = (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
    if isinstance(norm, FusedBatchNorm2d) and is_same and supports_excite(norm, se, x, shortcut):
        from reconv.kernels.ops.norm_squeeze_excite import batch_norm_squeeze_excite_add_relu

        assert isinstance(se, SqueezeExciteKernels)
        main, again, statistics = batch_norm_squeeze_excite_add_relu(
            x, norm.norm_params(), shortcut, norm.group_sizes(x), se.gate_of_means, stats
        )
        norm.record(statistics)
        return DualUse(main, again)
    return act(se(norm(x)) + shortcut)
