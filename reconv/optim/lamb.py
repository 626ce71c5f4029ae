"""LAMB: Adam with a trust ratio for every layer (You et al., 2020), in the form of NVIDIA and timm.

Their norm clipping (timm's `max_grad_norm`) is the gradient clipping of the training step.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from reconv.optim.adamw import EXP_AVG, EXP_AVG_SQ, adam_moments
from reconv.optim.lars import layer_norms
from reconv.optim.optimizer import BaseOptimizer, OptimizerSetup, ParamGroup, copy_if_ok, scaled
from reconv.optim.param_groups import DecayGroups, RateScale


class LAMB(BaseOptimizer):
    """LAMB: layer-wise adaptive learning rates for Adam.

    m and v as in Adam; u = (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon) + decay * w;
    r = |w| / |u|, or 1 where either norm is 0; w -= lr * r * u. Parameters without decay have r = 1.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        rate_scales: Mapping[str, RateScale] | None = None,
    ) -> None:
        super().__init__(
            groups,
            {EXP_AVG: 0.0, EXP_AVG_SQ: 0.0},
            weight_decay=weight_decay,
            rate_scales=rate_scales,
            counts_steps=True,
        )
        self._betas = betas
        self._epsilon = epsilon

    @classmethod
    def from_recipe(cls, setup: OptimizerSetup) -> LAMB:
        section = setup.section
        return cls(
            setup.groups,
            betas=section.betas,
            epsilon=section.effective_eps,
            weight_decay=section.weight_decay,
            rate_scales=setup.rate_scales,
        )

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        for group in self.param_groups():
            lamb_update(group, group.scale_lr(lr), ok, betas=self._betas, epsilon=self._epsilon)


def lamb_update(
    group: ParamGroup, lr: float | Tensor, ok: Tensor, *, betas: tuple[float, float], epsilon: float
) -> None:
    """Update a group in place; changes nothing if not ok."""
    moments = adam_moments(group, betas)
    updates = moments.directions(epsilon)
    if group.weight_decay:
        torch._foreach_add_(updates, group.params, alpha=group.weight_decay)
        ratios = _trust_ratios(layer_norms(group.params), layer_norms(updates))
        torch._foreach_mul_(updates, list(ratios.to(updates[0].dtype).unbind()))
    updates = scaled(updates, lr)
    copy_if_ok(torch._foreach_sub(group.params, updates), group.params, ok)
    moments.store(group, ok)


def _trust_ratios(weight_norms: Tensor, update_norms: Tensor) -> Tensor:
    """|w| / |u| of each layer, 1 where either is 0."""
    return torch.where((weight_norms > 0) & (update_norms > 0), weight_norms / update_norms, 1.0)
