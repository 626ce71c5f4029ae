"""Batch norm fused with the operations around it: activation, residual sum, max-pool, 1x1 convolution, and
squeeze-and-excitation.

Each function takes layers of a plain model. It calls the fused operation if the kernels support the layers and
tensors at hand, and otherwise computes the same by calling the layers one after another.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
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

    def forward_act(self, x: Tensor, act: Activation) -> Tensor:
        """act(norm(x)), computed by the kernels."""
        from reconv.kernels.batch_norm.ops import batch_norm_act

        y, statistics = batch_norm_act(x, self.norm_params(), self.group_sizes(), act)
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


def norm_act(norm: nn.Module, x: Tensor, act: nn.Module) -> Tensor:
    """act(norm(x))"""
    name = _ACTIVATIONS.get(type(act))
    if isinstance(norm, FusedBatchNorm2d) and name is not None and norm.supports(x):
        return norm.forward_act(x, name)
    out: Tensor = act(norm(x))
    return out


def norm_act_concat(norms: Sequence[FusedBatchNorm2d], x: Tensor, act: Activation) -> tuple[Tensor, ...]:
    """The activations of several norms over consecutive channels of x, by one kernel, split again."""
    from reconv.kernels.batch_norm.ops import NormParams, batch_norm_act

    parameters = [norm.norm_params() for norm in norms]
    weight, bias, running_var = (
        torch.cat([getattr(own, name) for own in parameters]) for name in ("weight", "bias", "running_var")
    )
    y, statistics = batch_norm_act(x, NormParams(weight, bias, running_var, norms[0].eps), norms[0].group_sizes(), act)
    widths = [norm.num_features for norm in norms]
    for norm, own in zip(norms, statistics.split(widths, 2), strict=True):
        norm.record(own)
    parts: tuple[Tensor, ...] = y.split(widths, 1)
    return parts


def norm_add_act(
    norm: nn.Module, x: Tensor, shortcut: Tensor, downsample: nn.Module | None, act: nn.Module
) -> Tensor | DualUse:
    """act(norm(x) + shortcut), where `downsample` matches the shortcut's shape to x; its norm is fused too."""
    name = _ACTIVATIONS.get(type(act))
    if isinstance(norm, FusedBatchNorm2d) and name in ("none", "relu") and norm.supports(x):
        other, other_norm = _before_norm(shortcut, downsample, norm)
        if norm.supports(other) and (other.shape, other.dtype) == (x.shape, x.dtype):
            return _add_norms(norm, x, other, other_norm, name)
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
) -> tuple[Tensor, FusedBatchNorm2d | None]:
    """The shortcut before the norm of its downsampling, and that norm if it can be fused with the sum."""
    if downsample is None:
        return shortcut, None
    if isinstance(downsample, nn.Sequential) and len(downsample) == 2:
        conv, last = downsample
        if isinstance(last, FusedBatchNorm2d) and last.training and not last.frozen and last.groups == norm.groups:
            return conv(shortcut), last
    return downsample(shortcut), None


def _add_norms(
    norm: FusedBatchNorm2d, x: Tensor, other: Tensor, other_norm: FusedBatchNorm2d | None, act: Activation
) -> DualUse:
    from reconv.kernels.batch_norm.ops import batch_norm_add_act, batch_norm_add_norm_act

    own, groups = norm.norm_params(), norm.group_sizes()
    if other_norm is None:
        main, shortcut, statistics = batch_norm_add_act(x, own, other, groups, act)
    else:
        theirs = other_norm.norm_params()
        main, shortcut, statistics, other_statistics = batch_norm_add_norm_act(x, own, other, theirs, groups, act)
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


def supports_conv1x1(norm: FusedBatchNorm2d, conv: nn.Module, x: Tensor) -> bool:
    """Whether kernels compute this norm of x, an activation and the convolution as one."""
    if not (isinstance(conv, nn.Conv2d) and conv.stride == (1, 1) and conv.bias is None and norm.supports(x)):
        return False
    from reconv.kernels.norm_conv1x1.ops import supports

    return supports(x, conv.weight)


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


def norm_squeeze_excite_add_relu(norm: nn.Module, x: Tensor, se: nn.Module, shortcut: Tensor, act: nn.Module) -> Any:
    """act(se(norm(x)) + shortcut)"""
    is_same = (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
    if isinstance(norm, FusedBatchNorm2d) and is_same and supports_excite(norm, se, x, shortcut):
        from reconv.kernels.norm_squeeze_excite.ops import batch_norm_squeeze_excite_add_relu

        assert isinstance(se, SqueezeExciteKernels)
        main, again, statistics = batch_norm_squeeze_excite_add_relu(
            x, norm.norm_params(), shortcut, norm.group_sizes(), se.gate_of_means
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
