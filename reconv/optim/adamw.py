"""AdamW: Adam with decoupled weight decay (Loshchilov and Hutter, 2019), foreach or by torch's fused kernel."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reconv.optim.optimizer import STEP, BaseOptimizer, OptimizerSetup, ParamGroup, copy_if_ok, fused_adamw, scaled
from reconv.optim.param_groups import DecayGroups, RateScale

EXP_AVG = "exp_avg"
EXP_AVG_SQ = "exp_avg_sq"


class AdamW(BaseOptimizer):
    """AdamW, as in torch.optim.AdamW.

    m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g * g;
    w -= lr * decay * w; w -= lr * (m / (1 - beta1^t)) / (sqrt(v / (1 - beta2^t)) + epsilon).

    t counts the updates of a parameter; a step that is not ok does not count.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        betas: tuple[float, float],
        epsilon: float,
        weight_decay: float,
        implementation: Literal["foreach", "fused"] = "foreach",
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
        self._implementation = implementation

    @classmethod
    def from_recipe(cls, setup: OptimizerSetup) -> AdamW:
        section = setup.section
        return cls(
            setup.groups,
            betas=section.betas,
            epsilon=section.effective_eps,
            weight_decay=section.weight_decay,
            implementation="fused" if section.implementation != "foreach" and setup.sgd == "fused" else "foreach",
            rate_scales=setup.rate_scales,
        )

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        update = self._update_fused if self._implementation == "fused" else self._update
        for group in self.param_groups():
            update(group, group.scale_lr(lr), ok)

    def _update(self, group: ParamGroup, lr: float | Tensor, ok: Tensor) -> None:
        moments = adam_moments(group, self._betas)
        updates = scaled(moments.directions(self._epsilon), lr)
        params = scaled(group.params, 1 - lr * group.weight_decay) if group.weight_decay else group.params
        copy_if_ok(torch._foreach_sub(params, updates), group.params, ok)
        moments.store(group, ok)

    def _update_fused(self, group: ParamGroup, lr: float | Tensor, ok: Tensor) -> None:
        state = group.state_tensors
        fused_adamw(
            group.params,
            group.grads,
            state[EXP_AVG],
            state[EXP_AVG_SQ],
            state[STEP],
            lr,
            group.weight_decay,
            ok,
            betas=self._betas,
            epsilon=self._epsilon,
        )


@dataclass(frozen=True, slots=True)
class AdamMoments:
    """The running averages of gradients and squared gradients after a step, which `store` makes the state."""

    exp_avgs: Sequence[Tensor]
    exp_avg_sqs: Sequence[Tensor]
    steps: Sequence[Tensor]
    betas: tuple[float, float]

    def directions(self, epsilon: float) -> list[Tensor]:
        """m / (sqrt(v) + epsilon) of each parameter, both without the bias of their start at zero."""
        dtype = torch.promote_types(self.exp_avgs[0].dtype, torch.float32)
        steps = torch.stack(list(self.steps)).to(dtype)
        correction1, correction2 = (_bias_correction(beta, steps).to(self.exp_avgs[0].dtype) for beta in self.betas)
        denominators = torch._foreach_sqrt(list(self.exp_avg_sqs))
        torch._foreach_div_(denominators, list(correction2.sqrt().unbind()))
        torch._foreach_add_(denominators, epsilon)
        updates = torch._foreach_div(list(self.exp_avgs), list(denominators))
        torch._foreach_div_(updates, list(correction1.unbind()))
        return list(updates)

    def store(self, group: ParamGroup, ok: Tensor) -> None:
        """Make this the state of the group, or keep its state if not ok."""
        copy_if_ok(self.exp_avgs, group.state_tensors[EXP_AVG], ok)
        copy_if_ok(self.exp_avg_sqs, group.state_tensors[EXP_AVG_SQ], ok)
        copy_if_ok(self.steps, group.state_tensors[STEP], ok)


def adam_moments(group: ParamGroup, betas: tuple[float, float]) -> AdamMoments:
    """The moments of a group after a step with its gradients."""
    state, (beta1, beta2) = group.state_tensors, betas
    exp_avgs = torch._foreach_lerp(state[EXP_AVG], group.grads, 1 - beta1)
    exp_avg_sqs = torch._foreach_mul(state[EXP_AVG_SQ], beta2)
    torch._foreach_addcmul_(exp_avg_sqs, group.grads, group.grads, value=1 - beta2)
    return AdamMoments(exp_avgs, exp_avg_sqs, torch._foreach_add(state[STEP], 1), betas)


def _bias_correction(beta: float, steps: Tensor) -> Tensor:
    """1 - beta^steps. In float32, 1 - 0.999 would have three correct digits less than expm1."""
    return -torch.expm1(steps * (math.log(beta) if beta else -math.inf))
