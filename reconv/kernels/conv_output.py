"""A convolution's output on its way to a batch norm, and the state their kernels share. Does not import Triton.

`DeferredGradient`: the backward pass of a sum may leave the gradient of a norm's input to the 1x1 convolution before
that norm; autograd then carries the gradient of the norm's output between the two. So the output of that convolution
is used by the norm alone, and no hook sees it (tests/kernels/test_conv1x1_norm_backward_ops.py).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from reconv.kernels.ops.batch_norm import NormInput


@dataclass(slots=True)
class DeferredGradient:
    """The gradient of a norm's input, left to the convolution before the norm.

    The norm's backward pass sets it and returns the gradient of its output instead. The convolution's backward pass is
    the next to run with it: the convolution's output must have no other use, and no hook.
    """

    norm: NormInput | None = None
    sums: Tensor | None = None  # of the gradient of the norm's output, dz [groups, channels]
    slope_sums: Tensor | None = None  # of dz * xhat

    def set(self, norm: NormInput, sums: Tensor, slope_sums: Tensor) -> None:
        """Leave the gradient to the convolution.

        What it will read is copied: once the norm's backward pass returns, hooks may change its parameters and their
        gradients, which share memory with the sums. The tensor is detached, since it leads to the node of the
        convolution, which holds this object: a gradient that is never taken must not keep the graph alive.
        """
        read = sums[None], slope_sums[None], norm.weight.detach().expand_as(sums)[None]
        self.sums, self.slope_sums, weight = torch.cat(read).unbind()
        self.norm = replace(norm, x=norm.x.detach(), weight=weight[0])

    def take(self) -> tuple[NormInput, Tensor, Tensor] | None:
        """Take the value that was set, once; None if the convolution gets an ordinary gradient."""
        if self.norm is None or self.sums is None or self.slope_sums is None:
            return None
        deferred = self.norm, self.sums, self.slope_sums
        self.norm = self.sums = self.slope_sums = None
        return deferred


@dataclass(frozen=True, slots=True)
class ConvOutput:
    """A convolution's output, or another tensor in its place; its statistics, if they are known; and where the norm
    behind it may leave its gradient, if the convolution computes it."""

    y: Tensor
    stats: Tensor | None = None
    deferred: DeferredGradient | None = None
