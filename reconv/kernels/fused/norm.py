"""Batch norm computed by kernels, and fused with its activation, a concatenation or squeeze-and-excitation.

Each function takes layers of a plain model. It calls the fused operation if the kernels support the layers and
tensors at hand, and otherwise computes the same by calling the layers one after another. 1x1 convolutions are in
`fused_conv1x1`, residual sums in `fused_sums`.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from reconv.kernels import dispatch
from reconv.kernels.fused.layers import SqueezeExciteKernels
from reconv.kernels.fused.plain_layers import ACTIVATIONS, has_hooks
from reconv.kernels.reference import Activation
from reconv.models.layers.batch_norm import BatchNorm2d, BatchNormAct2d

if TYPE_CHECKING:
    from reconv.kernels.ops.batch_norm import NormParams

# Importing any of the operations' modules imports Triton, so they are imported only once `supports` is true.


class FusedBatchNorm2d(BatchNorm2d):
    """Batch norm computed by Triton kernels in training."""

    def forward_groups(self, x: Tensor, groups: tuple[int, ...]) -> Tensor:
        is_supported = groups == self.groups and self.supports(x)
        return self.forward_act(x, "none") if is_supported else super().forward_groups(x, groups)

    def supports(self, *tensors: Tensor) -> bool:
        """True if the kernels can compute this norm, and the operations fused with it, for these tensors."""
        return (
            self.training
            and not self.frozen
            and self.affine
            and self.all_reduce is None
            and self.has_kernel_groups()
            and all(dispatch.supports(x) for x in tensors)
        )

    def supports_batch(self, *tensors: Tensor) -> bool:
        """The same where a tensor may have several rows per sample, such as windows, which kernels do not know."""
        return self.supports(*tensors) and all(len(x) == sum(self.group_sizes(x)) for x in tensors)

    def has_kernel_groups(self) -> bool:
        """True if the groups of the batch are known, and of sizes that kernels support."""
        return self.groups is not None and dispatch.supports_groups(self.groups)

    def forward_act(self, x: Tensor, act: Activation, stats: Tensor | None = None) -> Tensor:
        """act(norm(x)), computed by the kernels; `stats` are x's statistics, if they are known."""
        from reconv.kernels.ops.batch_norm import batch_norm_act

        y, statistics = batch_norm_act(x, self.norm_params(), self.group_sizes(x), act, stats)
        self.record(statistics)
        return y

    def norm_params(self) -> NormParams:
        """The norm's parameters as the kernels take them."""
        from reconv.kernels.ops.batch_norm import NormParams

        assert self.running_var is not None
        return NormParams(self.weight, self.bias, self.running_var, self.eps)

    def group_sizes(self, x: Tensor) -> tuple[int, ...]:
        """The number of samples in each group of the current batch, of which x is an image tensor."""
        assert self.groups is not None
        return self.groups

    def record(self, statistics: Tensor) -> None:
        """Store mean and unbiased variance from statistics [groups, 3, channels] for the running statistics."""
        self.batch_stats = statistics[:, :2].unbind()


class FusedBatchNormAct2d(FusedBatchNorm2d, BatchNormAct2d):
    """The same for an external model's norm with a built-in activation."""

    def forward(self, x: Tensor) -> Tensor:
        act = self.fusible_act()
        if act is not None and self.supports_batch(x):
            return self.forward_act(x, ACTIVATIONS[type(act)])
        return super().forward(x)

    def fusible_act(self) -> nn.Module | None:
        """The activation, if kernels know it and nothing else has to see the norm's output."""
        is_plain = type(self.drop) is nn.Identity and not has_hooks(self.drop) and not has_hooks(self.act)
        return self.act if is_plain and type(self.act) in ACTIVATIONS else None


class StandaloneBatchNorm2d(FusedBatchNorm2d):
    """A batch norm in anybody's training loop: the batch is one group, and running statistics change in each forward.

    It is made from another class of batch norm (`standalone_norm_class`), whose code runs for all that kernels do not
    support. Attributes of `BatchNorm2d` are the class's, so that a module of another class needs none of them.
    """

    fused_plain_class: type[nn.Module]
    groups: tuple[int, ...] | None = None
    frozen: bool = False
    all_reduce: Callable[[Tensor], Tensor] | None = None
    batch_stats: tuple[Tensor, ...] = ()

    def forward(self, x: Tensor) -> Tensor:
        if self.groups is not None and self.training:
            return super().forward(x)  # in our trainer, or traced as if in it
        return self.forward_act(x, "none") if self.supports(x) else self.forward_plain(x)

    def forward_plain(self, x: Tensor) -> Tensor:
        """The output by the code of the norm's own class."""
        output: Tensor = self.fused_plain_class.forward(self, x)
        return output

    def supports(self, *tensors: Tensor) -> bool:
        """The same as in our trainer, where torch raises no error: a channel needs more than one value."""
        return super().supports(*tensors) and all(x.numel() > x.shape[1] for x in tensors)

    def has_kernel_groups(self) -> bool:
        if self.groups is not None:
            return super().has_kernel_groups()
        return self.momentum is not None and self.track_running_stats and self.running_mean is not None

    def group_sizes(self, x: Tensor) -> tuple[int, ...]:
        return (len(x),) if self.groups is None else self.groups

    def record(self, statistics: Tensor) -> None:
        """Update the running statistics at once, as torch does."""
        if self.groups is not None:
            return super().record(statistics)
        from reconv.kernels.ops.batch_norm import update_running

        assert self.running_mean is not None and self.running_var is not None and self.momentum is not None
        assert self.num_batches_tracked is not None
        update_running(statistics, self.running_mean, self.running_var, self.num_batches_tracked, self.momentum)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles name the plain class, since the one made here has no name to import."""
        state = {**self.__dict__, **({"all_reduce": None} if "all_reduce" in self.__dict__ else {})}
        return _rebuild_norm, (self.fused_plain_class, isinstance(self, StandaloneBatchNormAct2d)), state


class StandaloneBatchNormAct2d(StandaloneBatchNorm2d, FusedBatchNormAct2d):
    """The same with a built-in activation: timm's BatchNormAct2d, or ours."""

    def forward(self, x: Tensor) -> Tensor:
        act = self.fusible_act()
        if act is not None and self.supports_batch(x):
            return self.forward_act(x, ACTIVATIONS[type(act)])
        if self.groups is not None and self.training:
            return BatchNormAct2d.forward(self, x)
        if not self.supports(x):
            return self.forward_plain(x)
        output: Tensor = self.act(self.drop(self.forward_act(x, "none")))
        return output


@cache
def standalone_norm_class(plain: Any, has_act: bool = False) -> type[StandaloneBatchNorm2d]:
    """The fused class of a class of batch norms; with `has_act`, of one that ends in a dropout and an activation."""
    kind = StandaloneBatchNormAct2d if has_act else StandaloneBatchNorm2d
    members = {"fused_plain_class": plain, "__module__": plain.__module__}
    made: Any = types.new_class(f"Fused{plain.__name__}", (kind, plain), exec_body=lambda space: space.update(members))
    return made  # type: ignore[no-any-return]


def _rebuild_norm(plain: Any, has_act: bool) -> nn.Module:
    made = standalone_norm_class(plain, has_act)
    return made.__new__(made)


def norm_act(norm: nn.Module, x: Tensor, act: nn.Module, stats: Tensor | None = None) -> Tensor:
    """act(norm(x)); `stats` are x's statistics, if they are known."""
    name = ACTIVATIONS.get(type(act))
    if isinstance(norm, FusedBatchNorm2d) and name is not None and norm.supports(x):
        return norm.forward_act(x, name, stats)
    out: Tensor = act(norm(x))
    return out


def supports_concat(norms: Sequence[FusedBatchNorm2d], x: Tensor) -> bool:
    """True if kernels compute these norms of tensors of the size of x, and write their outputs as one tensor."""
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
    from reconv.kernels.ops.norm_concat import batch_norm_relu_split

    parameters = [norm.norm_params() for norm in norms]
    first, second, third, statistics = batch_norm_relu_split(x, parameters, norms[0].group_sizes(x), num_channels)
    _record_parts(norms, statistics)
    return first, second, third


def norm_relu_concat(y: Tensor, norms: Sequence[FusedBatchNorm2d], inputs: Sequence[Tensor]) -> Tensor:
    """y with relu(norm(x)) of three inputs written into its last channels, in place."""
    from reconv.kernels.ops.norm_concat import batch_norm_relu_concat

    parameters = [norm.norm_params() for norm in norms]
    y, statistics = batch_norm_relu_concat(y, inputs, parameters, norms[0].group_sizes(y))
    _record_parts(norms, statistics)
    return y


def _record_parts(norms: Sequence[FusedBatchNorm2d], statistics: Tensor) -> None:
    for norm, part in zip(norms, statistics.split([norm.num_features for norm in norms], 2), strict=True):
        norm.record(part)


def norm_act_squeeze_excite(
    norm: nn.Module, x: Tensor, act: nn.Module, se: nn.Module, stats: Tensor | None = None
) -> Tensor:
    """se(act(norm(x))); `stats` are x's statistics, if they are known."""
    name = ACTIVATIONS.get(type(act))
    if name is not None and isinstance(norm, FusedBatchNorm2d) and supports_excite(norm, se, x):
        from reconv.kernels.ops.norm_squeeze_excite import batch_norm_act_squeeze_excite

        assert isinstance(se, SqueezeExciteKernels)
        y, statistics = batch_norm_act_squeeze_excite(
            x, norm.norm_params(), norm.group_sizes(x), name, se.gate_of_means, stats
        )
        norm.record(statistics)
        return y
    out: Tensor = se(norm_act(norm, x, act, stats))
    return out


def supports_excite(norm: FusedBatchNorm2d, se: nn.Module, x: Tensor, *others: Tensor) -> bool:
    """True if kernels compute this norm of x, an activation and the squeeze-and-excitation as one."""
    if not (isinstance(se, SqueezeExciteKernels) and se.supports_kernels(x) and norm.supports(x, *others)):
        return False
    from reconv.kernels.ops.norm_squeeze_excite import supports

    return supports(x)
