"""RMSprop in torch's and in TensorFlow's form, as foreach operations or fused kernels.

The forms differ in more than the position of epsilon: TensorFlow's mean square starts at 1, and its learning rate is
applied before momentum, so a change of the learning rate takes effect later.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from reconv.optim.optimizer import (
    BaseOptimizer,
    OptimizerSetup,
    ParamGroup,
    copy_if_ok,
    fused_lerp,
    fused_sgd,
    match_strides,
    scaled,
)
from reconv.optim.param_groups import DecayGroups, RateScale
from reconv.optim.sgd import MOMENTUM, descended

SQUARE = "square"


@dataclass(frozen=True, slots=True)
class RMSpropRule:
    """The update of a group of parameters, in place; it changes nothing if not ok."""

    form: Literal["torch", "tensorflow"]
    alpha: float
    epsilon: float
    momentum: float
    implementation: Literal["foreach", "fused"]

    def __call__(self, group: ParamGroup, lr: float | Tensor, ok: Tensor) -> None:
        grads = group.grads
        if group.weight_decay:
            grads = list(torch._foreach_add(grads, group.params, alpha=group.weight_decay))
        (self._update_fused if self.implementation == "fused" else self._update)(group, grads, lr, ok)

    def _update(self, group: ParamGroup, grads: list[Tensor], lr: float | Tensor, ok: Tensor) -> None:
        squares = torch._foreach_mul(group.state_tensors[SQUARE], self.alpha)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - self.alpha)
        updates = torch._foreach_div(grads, self._denominators(squares))
        if self.form == "tensorflow":
            updates = tuple(scaled(updates, lr))
        if self.momentum:
            momentum_buffers = group.state_tensors[MOMENTUM]
            updates = torch._foreach_add(updates, momentum_buffers, alpha=self.momentum)
            copy_if_ok(updates, momentum_buffers, ok)
        copy_if_ok(squares, group.state_tensors[SQUARE], ok)
        final_lr = 1.0 if self.form == "tensorflow" else lr
        copy_if_ok(descended(group.params, list(updates), final_lr), group.params, ok)

    def _update_fused(self, group: ParamGroup, grads: list[Tensor], lr: float | Tensor, ok: Tensor) -> None:
        """The same in a handful of passes: a lerp of the mean square towards g * g, then fused SGD."""
        squares = group.state_tensors[SQUARE]
        grads = [match_strides(g, p) for g, p in zip(grads, group.params, strict=True)]
        fused_lerp(squares, torch._foreach_mul(grads, grads), 1 - self.alpha, ok)
        updates = list(torch._foreach_div(grads, self._denominators(squares)))
        final_lr = lr
        if self.form == "tensorflow":
            updates, final_lr = scaled(updates, lr), 1.0
        momentum_buffers = group.state_tensors.get(MOMENTUM, [])
        fused_sgd(group.params, updates, momentum_buffers, final_lr, 0.0, ok, momentum=self.momentum)

    def _denominators(self, squares: Sequence[Tensor]) -> list[Tensor]:
        if self.form == "tensorflow":
            return list(torch._foreach_sqrt(torch._foreach_add(list(squares), self.epsilon)))
        return list(torch._foreach_add(torch._foreach_sqrt(list(squares)), self.epsilon))


class RMSprop(BaseOptimizer):
    """RMSprop with momentum, in the variants of torch and TensorFlow.

    g += decay * w; s = alpha * s + (1 - alpha) * g * g, then, with momentum m:

    torch: v = m * v + g / (sqrt(s) + epsilon); w -= lr * v. tensorflow: v = m * v + lr * g / sqrt(s + epsilon); w -= v.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        form: Literal["torch", "tensorflow"],
        alpha: float,
        epsilon: float,
        momentum: float,
        weight_decay: float,
        implementation: Literal["foreach", "fused"] = "foreach",
        rate_scales: Mapping[str, RateScale] | None = None,
    ) -> None:
        initial = {SQUARE: 1.0 if form == "tensorflow" else 0.0} | ({MOMENTUM: 0.0} if momentum else {})
        super().__init__(groups, initial, weight_decay=weight_decay, rate_scales=rate_scales)
        self._rule = RMSpropRule(form, alpha, epsilon, momentum, implementation)

    @classmethod
    def from_recipe(cls, setup: OptimizerSetup) -> RMSprop:
        section = setup.section
        return cls(
            setup.groups,
            form="tensorflow" if section.name == "rmsprop-tf" else "torch",
            alpha=section.alpha if setup.alpha is None else setup.alpha,
            epsilon=section.effective_eps,
            momentum=section.momentum,
            weight_decay=section.weight_decay,
            implementation="fused" if section.implementation == "auto" and setup.is_on_cuda else "foreach",
            rate_scales=setup.rate_scales,
        )

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        for group in self.param_groups():
            self._rule(group, group.scale_lr(lr), ok)
