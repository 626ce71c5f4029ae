"""Batch norm fused with the operations around it: activation, residual sum, concatenation, max-pool, 1x1 convolutions
before and after it or after the residual sum, and squeeze-and-excitation; and 1x1 convolutions that compute the
statistics of the norm after them.

Each function takes layers of a plain model. It calls the fused operation if the kernels support the layers and
tensors at hand, and otherwise computes the same by calling the layers one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from reconv.kernels import dispatch
from reconv.kernels.fused_modules.fused_layers import SqueezeExciteKernels, pool_window
from reconv.kernels.reference import Activation
from reconv.kernels.window import STEM_WINDOWS
from reconv.models.layers.batch_norm import BatchNorm2d, BatchNormAct2d

if TYPE_CHECKING:
    from reconv.kernels.batch_norm.ops import NormParams

# Importing any of the operations' modules imports Triton, so they are imported only once `supports` is true.


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
    x: Tensor
    other: Tensor
    other_norm: FusedBatchNorm2d | None
    stats: Tensor | None = None  # of x and other, if they are known
    other_stats: Tensor | None = None


def computed(x: Any) -> Any:
    """The sum, if x is one that is not computed yet; else x."""
    if not isinstance(x, PendingSum):
        return x
    return _add_norms(x.norm, x.x, x.other, x.other_norm, "relu", x.stats, x.other_stats)


class FusedBatchNorm2d(BatchNorm2d):
    """Batch norm computed by Triton kernels in training."""

    def forward_groups(self, x: Tensor, groups: tuple[int, ...]) -> Tensor:
        is_supported = groups == self.groups and self.supports(x)
        return self.forward_act(x, "none") if is_supported else super().forward_groups(x, groups)

    def supports(self, *tensors: Tensor) -> bool:
        """Whether the kernels can compute this norm, and the operations fused with it, for these tensors."""
        return (
            self.training
            and not self.frozen
            and self.affine
            and self.all_reduce is None
            and self.groups is not None
            and dispatch.supports_groups(self.groups)
            and all(dispatch.supports(x) for x in tensors)
        )

    def supports_batch(self, *tensors: Tensor) -> bool:
        """The same where a tensor may have several rows per sample, such as windows, which kernels do not know."""
        return self.supports(*tensors) and all(len(x) == sum(self.group_sizes()) for x in tensors)

    def forward_act(self, x: Tensor, act: Activation, stats: Tensor | None = None) -> Tensor:
        """act(norm(x)), computed by the kernels; `stats` are x's statistics, if they are known."""
        from reconv.kernels.batch_norm.ops import batch_norm_act

        y, statistics = batch_norm_act(x, self.norm_params(), self.group_sizes(), act, stats)
        self.record(statistics)
        return y

    def norm_params(self) -> NormParams:
        """The norm's parameters as the kernels take them."""
        from reconv.kernels.batch_norm.ops import NormParams

        assert self.running_var is not None
        return NormParams(self.weight, self.bias, self.running_var, self.eps)

    def group_sizes(self) -> tuple[int, ...]:
        """The number of samples in each group of the current batch."""
        assert self.groups is not None
        return self.groups

    def record(self, statistics: Tensor) -> None:
        """Store mean and unbiased variance from statistics [groups, 3, channels] for the running statistics."""
        self.batch_stats = statistics[:, :2].unbind()


_ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Identity: "none",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}


class FusedBatchNormAct2d(FusedBatchNorm2d, BatchNormAct2d):
    """The same for an external model's norm with a built-in activation."""

    def forward(self, x: Tensor) -> Tensor:
        act = self.fusible_act()
        if act is not None and self.supports_batch(x):
            return self.forward_act(x, _ACTIVATIONS[type(act)])
        return super().forward(x)

    def fusible_act(self) -> nn.Module | None:
        """The activation, if kernels know it and nothing else has to see the norm's output."""
        is_plain = type(self.drop) is nn.Identity and not has_hooks(self.drop) and not has_hooks(self.act)
        return self.act if is_plain and type(self.act) in _ACTIVATIONS else None


def has_hooks(module: nn.Module) -> bool:
    """Whether calling a module does more than its class's forward pass: then it must be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or _has_any_global_hook()


def is_fusible_act(module: nn.Module) -> bool:
    """Whether kernels know this activation, and nothing else has to see its input or output."""
    return type(module) in _ACTIVATIONS and not has_hooks(module)


def norm_act(norm: nn.Module, x: Tensor, act: nn.Module, stats: Tensor | None = None) -> Tensor:
    """act(norm(x)); `stats` are x's statistics, if they are known."""
    name = _ACTIVATIONS.get(type(act))
    if isinstance(norm, FusedBatchNorm2d) and name is not None and norm.supports(x):
        return norm.forward_act(x, name, stats)
    out: Tensor = act(norm(x))
    return out


def conv_norm_act(conv: nn.Module, norm: nn.Module, x: Tensor, act: nn.Module) -> Tensor:
    """act(norm(conv(x)))"""
    y, stats = conv_statistics(conv, norm, x)
    return norm_act(norm, y, act, stats)


def conv_statistics(conv: nn.Module, norm: nn.Module, x: Tensor) -> tuple[Tensor, Tensor | None]:
    """conv(x), and its statistics for the norm after it where one kernel computes both."""
    if isinstance(norm, FusedBatchNorm2d) and is_plain_conv1x1(conv) and norm.supports(x):
        assert isinstance(conv, nn.Conv2d)
        found = conv1x1_statistics(x, conv.weight, norm.norm_params(), norm.group_sizes())
        if found is not None:
            return found
    return conv(x), None


def conv1x1_statistics(
    x: Tensor, weight: Tensor, norm: NormParams, groups: Sequence[int]
) -> tuple[Tensor, Tensor] | None:
    """A 1x1 convolution and the statistics of its output; None where separate kernels compute them."""
    from reconv.kernels.conv1x1_statistics import ops

    if x.dtype != dispatch.conv_output_dtype(x) or len(x) != sum(groups) or not ops.supports(x, weight):
        return None
    return ops.conv1x1_statistics(x, weight.to(x.dtype), norm, groups)


def is_plain_conv1x1(conv: nn.Module) -> bool:
    """Whether calling a layer is no more than a 1x1 convolution of stride 1 without bias."""
    return (
        type(conv) is nn.Conv2d
        and not has_hooks(conv)
        and (conv.kernel_size, conv.stride, conv.padding) == ((1, 1), (1, 1), (0, 0))
        and conv.groups == 1
        and conv.bias is None
    )


def supports_concat(norms: Sequence[FusedBatchNorm2d], x: Tensor) -> bool:
    """Whether kernels compute these norms of tensors of the size of x, and write their outputs as one tensor."""
    num_channels = sum(norm.num_features for norm in norms)
    return (
        all(norm.supports(x) and norm.num_features % dispatch.CHANNEL_MULTIPLE == 0 for norm in norms)
        and len({(norm.groups, norm.eps, norm.weight.dtype) for norm in norms}) == 1
        and x.numel() // x.shape[1] * num_channels <= dispatch.MAX_ELEMENTS
    )


def norm_relu_split(norms: Sequence[FusedBatchNorm2d], x: Tensor, num_channels: int) -> tuple[Tensor, Tensor, Tensor]:
    """relu(norm(part)) of three consecutive ranges of channels of x.

    The first is returned as the first of `num_channels` channels; `norm_relu_concat` writes the others.
    """
    from reconv.kernels.norm_concat.ops import batch_norm_relu_split

    parameters = [norm.norm_params() for norm in norms]
    first, second, third, statistics = batch_norm_relu_split(x, parameters, norms[0].group_sizes(), num_channels)
    _record_parts(norms, statistics)
    return first, second, third


def norm_relu_concat(y: Tensor, norms: Sequence[FusedBatchNorm2d], inputs: Sequence[Tensor]) -> Tensor:
    """y with relu(norm(x)) of three inputs written into its last channels, in place."""
    from reconv.kernels.norm_concat.ops import batch_norm_relu_concat

    parameters = [norm.norm_params() for norm in norms]
    y, statistics = batch_norm_relu_concat(y, inputs, parameters, norms[0].group_sizes())
    _record_parts(norms, statistics)
    return y


def _record_parts(norms: Sequence[FusedBatchNorm2d], statistics: Tensor) -> None:
    for norm, own in zip(norms, statistics.split([norm.num_features for norm in norms], 2), strict=True):
        norm.record(own)


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
    out: Tensor | DualUse = computed(pending_norm_add_act(norm, x, shortcut, downsample, act, stats))
    return out


def pending_norm_add_act(
    norm: nn.Module,
    x: Tensor,
    shortcut: Tensor,
    downsample: nn.Module | None,
    act: nn.Module,
    stats: Tensor | None = None,
) -> Tensor | DualUse | PendingSum:
    """The same, but a sum that kernels can compute together with a convolution of it is left to be computed."""
    name = _ACTIVATIONS.get(type(act))
    if isinstance(norm, FusedBatchNorm2d) and name in ("none", "relu") and norm.supports(x):
        other, other_norm, other_stats = _before_norm(shortcut, downsample, norm)
        if norm.supports(other) and (other.shape, other.dtype) == (x.shape, x.dtype):
            if name == "relu":
                return PendingSum(norm, x, other, other_norm, stats, other_stats)
            return _add_norms(norm, x, other, other_norm, name, stats, other_stats)
        shortcut, downsample = other, other_norm
    y = norm(x)
    out: Tensor = act(y + (shortcut if downsample is None else downsample(shortcut)))
    return out


def norm_add_norm_act(
    norm: nn.Module, x: Tensor, other: Tensor, other_norm: nn.Module | None, act: nn.Module
) -> Tensor | DualUse:
    """act(norm(x) + other_norm(other)), or plus other."""
    name = _ACTIVATIONS.get(type(act))
    is_same = (other.shape, other.dtype) == (x.shape, x.dtype)
    if isinstance(norm, FusedBatchNorm2d) and name in ("none", "relu") and is_same and norm.supports_batch(x, other):
        if other_norm is None:
            return _add_norms(norm, x, other, None, name)
        if isinstance(other_norm, FusedBatchNorm2d) and other_norm.supports(other) and other_norm.groups == norm.groups:
            return _add_norms(norm, x, other, other_norm, name)
    y = norm(x)
    out: Tensor = act(y + (other if other_norm is None else other_norm(other)))
    return out


def _before_norm(
    shortcut: Tensor, downsample: nn.Module | None, norm: FusedBatchNorm2d
) -> tuple[Tensor, FusedBatchNorm2d | None, Tensor | None]:
    """The shortcut before the norm of its downsampling, that norm if it can be fused with the sum, and its statistics
    if they are known."""
    if downsample is None:
        return shortcut, None, None
    if isinstance(downsample, nn.Sequential) and len(downsample) == 2:
        conv, last = downsample
        if isinstance(last, FusedBatchNorm2d) and last.training and not last.frozen and last.groups == norm.groups:
            y, stats = conv_statistics(conv, last, shortcut)
            return y, last, stats
    return downsample(shortcut), None, None


def _add_norms(
    norm: FusedBatchNorm2d,
    x: Tensor,
    other: Tensor,
    other_norm: FusedBatchNorm2d | None,
    act: Activation,
    stats: Tensor | None = None,
    other_stats: Tensor | None = None,
) -> DualUse:
    from reconv.kernels.batch_norm.ops import batch_norm_add_act, batch_norm_add_norm_act

    own, groups = norm.norm_params(), norm.group_sizes()
    if other_norm is None:
        main, shortcut, statistics = batch_norm_add_act(x, own, other, groups, act, stats)
    else:
        theirs = other_norm.norm_params()
        main, shortcut, statistics, other_statistics = batch_norm_add_norm_act(
            x, own, other, theirs, groups, act, stats, other_stats
        )
        other_norm.record(other_statistics)
    norm.record(statistics)
    return DualUse(main, shortcut)


def norm_act_pool(norm: nn.Module, x: Tensor, act: nn.Module, pool: nn.Module) -> Tensor | DualUse:
    """pool(act(norm(x)))"""
    window = pool_window(pool)
    is_stem = type(act) is nn.ReLU and window in STEM_WINDOWS
    if isinstance(norm, FusedBatchNorm2d) and is_stem and window is not None and norm.supports(x):
        from reconv.kernels.norm_max_pool.ops import batch_norm_relu_max_pool

        main, shortcut, statistics = batch_norm_relu_max_pool(x, norm.norm_params(), norm.group_sizes(), window)
        norm.record(statistics)
        return DualUse(main, shortcut)
    out: Tensor = pool(norm_act(norm, x, act))
    return out


def norm_act_conv1x1(norm: nn.Module, x: Tensor, act: nn.Module, conv: nn.Module) -> Tensor:
    """conv(act(norm(x)))"""
    name = _ACTIVATIONS.get(type(act))
    if name is not None and isinstance(norm, FusedBatchNorm2d) and supports_conv1x1(norm, conv, x):
        from reconv.kernels.norm_conv1x1.ops import batch_norm_act_conv1x1

        assert isinstance(conv, nn.Conv2d)
        filters = conv.weight.to(x.dtype)
        y, statistics = batch_norm_act_conv1x1(x, norm.norm_params(), filters, norm.group_sizes(), name)
        norm.record(statistics)
        return y
    out: Tensor = conv(norm_act(norm, x, act))
    return out


def conv1x1_norm_act(conv: nn.Module, norm: nn.Module, x: Tensor, act: nn.Module) -> Tensor:
    """act(norm(conv(x))), as one operation if the convolution is a 1x1 expansion."""
    name = _ACTIVATIONS.get(type(act))
    if name is not None and isinstance(norm, FusedBatchNorm2d) and supports_expansion(conv, norm, x):
        from reconv.kernels.conv1x1_norm_act.ops import conv1x1_batch_norm_act

        assert isinstance(conv, nn.Conv2d)
        filters = conv.weight.to(x.dtype)
        y, statistics = conv1x1_batch_norm_act(x, filters, norm.norm_params(), norm.group_sizes(), name)
        norm.record(statistics)
        return y
    return conv_norm_act(conv, norm, x, act)


def supports_expansion(conv: nn.Module, norm: FusedBatchNorm2d, x: Tensor) -> bool:
    """Whether kernels compute the convolution of x, this norm and an activation as one."""
    if type(conv) is not nn.Conv2d or has_hooks(conv) or not norm.supports(x):
        return False
    is_plain = (conv.stride, conv.padding, conv.groups, conv.bias) == ((1, 1), (0, 0), 1, None)
    if not is_plain or dispatch.conv_output_dtype(x) != x.dtype:
        return False
    from reconv.kernels.conv1x1_norm_act.ops import supports

    return supports(x, conv.weight)


def supports_conv1x1(norm: FusedBatchNorm2d, conv: nn.Module, x: Tensor) -> bool:
    """Whether kernels compute this norm of x, an activation and the convolution as one."""
    if not (isinstance(conv, nn.Conv2d) and conv.stride == (1, 1) and conv.bias is None and norm.supports(x)):
        return False
    from reconv.kernels.norm_conv1x1.ops import supports

    return supports(x, conv.weight)


def conv1x1_dual(x: Tensor | DualUse | PendingSum, conv: nn.Module, norm: nn.Module) -> tuple[DualUse, Tensor | None]:
    """conv(x), and x for the shortcut; and the statistics of conv(x) for the norm after it where they are known."""
    if not isinstance(x, PendingSum) or not supports_sum_conv1x1(x, conv):
        main, shortcut = dual(computed(x))
        y, stats = conv_statistics(conv, norm, main)
        return DualUse(y, shortcut), stats
    from reconv.kernels.sum_conv1x1.ops import batch_norm_add_relu_conv1x1

    assert isinstance(conv, nn.Conv2d)
    other_norm = None if x.other_norm is None else x.other_norm.norm_params()
    is_known = isinstance(norm, FusedBatchNorm2d) and norm.groups == x.norm.groups and norm.supports(x.x)
    y, shortcut, statistics, other_statistics, conv_stats = batch_norm_add_relu_conv1x1(
        x.x, x.norm.norm_params(), x.other, other_norm, conv.weight.to(x.x.dtype), x.norm.group_sizes(),
        norm.norm_params() if isinstance(norm, FusedBatchNorm2d) and is_known else None, x.stats, x.other_stats,
    )  # fmt: skip
    x.norm.record(statistics)
    if x.other_norm is not None and other_statistics is not None:
        x.other_norm.record(other_statistics)
    return DualUse(y, shortcut), conv_stats


def supports_sum_conv1x1(x: PendingSum, conv: nn.Module) -> bool:
    """Whether kernels compute this sum and the convolution as one; a convolution with hooks is called."""
    if type(conv) is not nn.Conv2d or has_hooks(conv) or dispatch.conv_output_dtype(x.x) != x.x.dtype:
        return False
    is_plain = (conv.stride, conv.padding, conv.groups, conv.bias) == ((1, 1), (0, 0), 1, None)
    if not is_plain or conv.padding_mode != "zeros":
        return False
    from reconv.kernels.sum_conv1x1.ops import supports

    return supports(x.x, conv.weight)


def norm_act_squeeze_excite(norm: nn.Module, x: Tensor, act: nn.Module, se: nn.Module) -> Tensor:
    """se(act(norm(x)))"""
    name = _ACTIVATIONS.get(type(act))
    if name is not None and isinstance(norm, FusedBatchNorm2d) and supports_excite(norm, se, x):
        from reconv.kernels.norm_squeeze_excite.ops import batch_norm_act_squeeze_excite

        assert isinstance(se, SqueezeExciteKernels)
        y, statistics = batch_norm_act_squeeze_excite(x, norm.norm_params(), norm.group_sizes(), name, se.gate_of_means)
        norm.record(statistics)
        return y
    out: Tensor = se(norm_act(norm, x, act))
    return out


def norm_squeeze_excite_add_relu(
    norm: nn.Module, x: Tensor, se: nn.Module, shortcut: Tensor, act: nn.Module, stats: Tensor | None = None
) -> Any:
    """act(se(norm(x)) + shortcut); `stats` are x's statistics, if they are known."""
    is_same = (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
    if isinstance(norm, FusedBatchNorm2d) and is_same and supports_excite(norm, se, x, shortcut):
        from reconv.kernels.norm_squeeze_excite.ops import batch_norm_squeeze_excite_add_relu

        assert isinstance(se, SqueezeExciteKernels)
        main, again, statistics = batch_norm_squeeze_excite_add_relu(
            x, norm.norm_params(), shortcut, norm.group_sizes(), se.gate_of_means, stats
        )
        norm.record(statistics)
        return DualUse(main, again)
    return act(se(norm(x)) + shortcut)


def supports_excite(norm: FusedBatchNorm2d, se: nn.Module, x: Tensor, *others: Tensor) -> bool:
    """Whether kernels compute this norm of x, an activation and the squeeze-and-excitation as one."""
    if not (isinstance(se, SqueezeExciteKernels) and se.supports_kernels(x) and norm.supports(x, *others)):
        return False
    from reconv.kernels.norm_squeeze_excite.ops import supports

    return supports(x)
