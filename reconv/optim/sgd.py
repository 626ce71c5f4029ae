"""SGD with momentum, as fused kernels, as foreach operations or by a vendor's optimizer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from reconv.optim.optimizer import BaseOptimizer, OptimizerSetup, copy_if_ok, fused_sgd, scaled
from reconv.optim.param_groups import DecayGroups, RateScale
from reconv.optim.vendor_sgd import SGDClass, VendorSGD

Implementation = Literal["foreach", "fused"] | VendorSGD
MOMENTUM = "momentum"


class SGD(BaseOptimizer):
    """SGD with momentum, as in torch.optim.SGD.

    g += decay * w; v = momentum * v + g; w -= lr * v (or g + momentum * v with nesterov).

    Buffers start at zero, which gives torch's first step (v = g) without a special case.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        implementation: Implementation = "foreach",
        rate_scales: Mapping[str, RateScale] | None = None,
    ) -> None:
        super().__init__(
            groups, {MOMENTUM: 0.0} if momentum else {}, weight_decay=weight_decay, rate_scales=rate_scales
        )
        self._momentum = momentum
        self._nesterov = nesterov
        self._implementation = implementation

    @classmethod
    def from_recipe(cls, setup: OptimizerSetup) -> SGD:
        section = setup.section
        return cls(
            setup.groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            implementation=choose_implementation(section.implementation, setup.sgd),
            rate_scales=setup.rate_scales,
        )

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        for group in self.param_groups():
            sgd_update(
                group.params,
                group.grads,
                group.state_tensors.get(MOMENTUM, []),
                group.scale_lr(lr),
                group.weight_decay,
                ok,
                momentum=self._momentum,
                nesterov=self._nesterov,
                implementation=self._implementation,
            )


def sgd_update(
    params: list[Tensor],
    grads: list[Tensor],
    momentum_buffers: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    ok: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    implementation: Implementation,
) -> None:
    """Weight decay, momentum and step for a list of tensors, in place; changes nothing if not ok."""
    if isinstance(implementation, VendorSGD):
        implementation(params, momentum_buffers, lr, weight_decay, ok, momentum=momentum, nesterov=nesterov)
        return
    if implementation == "fused":
        fused_sgd(params, grads, momentum_buffers, lr, weight_decay, ok, momentum=momentum, nesterov=nesterov)
        return
    if weight_decay:
        grads = list(torch._foreach_add(grads, params, alpha=weight_decay))
    if momentum_buffers:
        velocities = torch._foreach_mul(momentum_buffers, momentum)
        torch._foreach_add_(velocities, grads)
        grads = list(torch._foreach_add(grads, velocities, alpha=momentum)) if nesterov else list(velocities)
        copy_if_ok(velocities, momentum_buffers, ok)
    copy_if_ok(descended(params, grads, lr), params, ok)


def choose_implementation(requested: str, sgd: str | SGDClass) -> Implementation:
    """Implementation that the recipe asks for, else the fastest on the device."""
    if requested == "foreach" or sgd == "foreach":
        return "foreach"
    return "fused" if isinstance(sgd, str) else VendorSGD(sgd)


def descended(params: list[Tensor], updates: list[Tensor], lr: float | Tensor) -> Sequence[Tensor]:
    """params - lr * updates."""
    if isinstance(lr, Tensor):
        return torch._foreach_sub(params, scaled(updates, lr))
    return torch._foreach_add(params, updates, alpha=-lr)
