"""RMSprop in torch's and in TensorFlow's form, plain and fused, gated on the device.

Owns the two update rules. Refuses to know schedules. Invariant: a step that is not ok changes neither weights nor
state.

They differ in more than where epsilon stands: TensorFlow's mean square starts at 1 and its learning rate goes into
the momentum, so a rate that falls is felt later.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from reconv.optim.fused import approach_fused, descend_fused, with_strides
from reconv.optim.optimizer_state import OptimizerState, ParamGroup, commit, scaled
from reconv.optim.param_groups import DecayGroups
from reconv.optim.sgd import MOMENTUM, moved_by

Form = Literal["torch", "tensorflow"]
SQUARE = "square"


class RMSprop(OptimizerState):
    """g += decay * w; s = alpha * s + (1 - alpha) * g * g, then, with momentum m:

    torch: v = m * v + g / (sqrt(s) + epsilon); w -= lr * v. tensorflow: v = m * v + lr * g / sqrt(s + epsilon); w -= v.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        form: Form,
        alpha: float,
        epsilon: float,
        momentum: float,
        weight_decay: float,
        path: Literal["foreach", "fused"] = "foreach",
    ) -> None:
        initial = {SQUARE: 1.0 if form == "tensorflow" else 0.0}
        super().__init__(groups, initial | ({MOMENTUM: 0.0} if momentum else {}))
        self._form = form
        self._alpha = alpha
        self._epsilon = epsilon
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._path = path

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or nothing at all when not ok."""
        update = self._update_fused if self._path == "fused" else self._update
        for group in self.groups():
            grads = group.grads
            if group.is_decayed and self._weight_decay:
                grads = list(torch._foreach_add(grads, group.params, alpha=self._weight_decay))
            update(group, grads, lr, ok)

    def _update(self, group: ParamGroup, grads: list[Tensor], lr: float | Tensor, ok: Tensor) -> None:
        squares = torch._foreach_mul(group.slots[SQUARE], self._alpha)
        torch._foreach_addcmul_(squares, grads, grads, value=1 - self._alpha)
        moves = torch._foreach_div(grads, self._roots(squares))
        if self._form == "tensorflow":
            moves = tuple(scaled(moves, lr))
        if self._momentum:
            buffers = group.slots[MOMENTUM]
            moves = torch._foreach_add(moves, buffers, alpha=self._momentum)
            commit(moves, buffers, ok)
        commit(squares, group.slots[SQUARE], ok)
        rate = 1.0 if self._form == "tensorflow" else lr
        commit(moved_by(group.params, list(moves), rate), group.params, ok)

    def _update_fused(self, group: ParamGroup, grads: list[Tensor], lr: float | Tensor, ok: Tensor) -> None:
        """The same in a handful of passes: the mean square approaches g * g, and the rest is a descent."""
        squares = group.slots[SQUARE]
        grads = [with_strides(g, p) for g, p in zip(grads, group.params, strict=True)]
        approach_fused(squares, torch._foreach_mul(grads, grads), 1 - self._alpha, ok)
        moves = list(torch._foreach_div(grads, self._roots(squares)))
        rate = lr
        if self._form == "tensorflow":
            moves, rate = scaled(moves, lr), 1.0
        buffers = group.slots.get(MOMENTUM, [])
        descend_fused(group.params, moves, buffers, rate, 0.0, ok, momentum=self._momentum)

    def _roots(self, squares: Sequence[Tensor]) -> list[Tensor]:
        """What gradients are divided by."""
        if self._form == "tensorflow":
            return list(torch._foreach_sqrt(torch._foreach_add(list(squares), self._epsilon)))
        return list(torch._foreach_add(torch._foreach_sqrt(list(squares)), self._epsilon))
