"""LARS: SGD with momentum and a trust ratio for every layer (You, Gitman and Ginsburg, 2017).

As in the TensorFlow reference, the learning rate is applied to the gradient before momentum.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reconv.optim.optimizer import BaseOptimizer, OptimizerSetup, ParamGroup, scaled
from reconv.optim.param_groups import DecayGroups, RateScale
from reconv.optim.sgd import MOMENTUM, Implementation, choose_implementation, sgd_update


class LARS(BaseOptimizer):
    """LARS: layer-wise adaptive learning rates for SGD with momentum.

    r = trust_coefficient * |w| / (|g| + decay * |w| + epsilon), or 1 where either norm is 0;
    v = momentum * v + lr * r * (g + decay * w); w -= v. Parameters without decay have r = 1.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        trust_coefficient: float,
        epsilon: float,
        implementation: Implementation = "foreach",
        rate_scales: Mapping[str, RateScale] | None = None,
    ) -> None:
        super().__init__(
            groups, {MOMENTUM: 0.0} if momentum else {}, weight_decay=weight_decay, rate_scales=rate_scales
        )
        self._momentum = momentum
        self._nesterov = nesterov
        self._trust_coefficient = trust_coefficient
        self._epsilon = epsilon
        self._implementation = implementation

    @classmethod
    def from_recipe(cls, setup: OptimizerSetup) -> LARS:
        section = setup.section
        # Its gradients are rescaled copies, and a vendor's optimizer would read those of the parameters.
        sgd = setup.sgd if isinstance(setup.sgd, str) else "foreach"
        return cls(
            setup.groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            trust_coefficient=section.trust_coefficient,
            epsilon=section.effective_eps,
            implementation=choose_implementation(section.implementation, sgd),
            rate_scales=setup.rate_scales,
        )

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        for group in self.param_groups():
            lars_update(
                group,
                group.scale_lr(lr),
                ok,
                momentum=self._momentum,
                nesterov=self._nesterov,
                trust_coefficient=self._trust_coefficient,
                epsilon=self._epsilon,
                implementation=self._implementation,
            )


def lars_update(
    group: ParamGroup,
    lr: float | Tensor,
    ok: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    trust_coefficient: float,
    epsilon: float,
    implementation: Implementation,
) -> None:
    """Update a group in place; changes nothing if not ok."""
    grads = _adapted(group, lr, trust_coefficient, epsilon) if group.is_decayed else scaled(group.grads, lr)
    # The gradients contain the learning rate and the decay already.
    sgd_update(
        group.params,
        grads,
        group.state_tensors.get(MOMENTUM, []),
        1.0,
        0.0,
        ok,
        momentum=momentum,
        nesterov=nesterov,
        implementation=implementation,
    )


def _adapted(group: ParamGroup, lr: float | Tensor, trust_coefficient: float, epsilon: float) -> list[Tensor]:
    """Gradients plus decay, times lr and the trust ratio of their layer."""
    params, grads, weight_decay = group.params, group.grads, group.weight_decay
    weight_norms, grad_norms = layer_norms(params), layer_norms(grads)
    ratios = trust_coefficient * weight_norms
    ratios = ratios / (grad_norms + weight_decay * weight_norms + epsilon)
    layer_lrs = lr * torch.where((weight_norms > 0) & (grad_norms > 0), ratios, 1.0)
    decayed = torch._foreach_add(grads, params, alpha=weight_decay)
    return list(torch._foreach_mul(decayed, list(layer_lrs.to(params[0].dtype).unbind())))


def layer_norms(tensors: list[Tensor]) -> Tensor:
    """The L2 norm of each tensor, in float32 or wider."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([norm.to(dtype) for norm in torch._foreach_norm(tensors, 2, dtype=dtype)])
