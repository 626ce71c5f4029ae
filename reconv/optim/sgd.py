"""Stochastic gradient descent with momentum, gated on the device.

Owns the update, plain and fused. Refuses to know schedules: the learning rate comes with each step. Invariant: a step
that is not ok changes neither weights nor momentum, and nobody on the host has to know in time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import torch
from torch import Tensor

from reconv.optim.fused import descend_fused
from reconv.optim.optimizer_state import OptimizerState, commit, scaled
from reconv.optim.param_groups import DecayGroups
from reconv.optim.vendor import VendorDescent

Path = Literal["foreach", "fused"] | VendorDescent
MOMENTUM = "momentum"


class SGD(OptimizerState):
    """torch.optim.SGD's mathematics: g += decay * w; v = momentum * v + g; w -= lr * v (or g + momentum * v).

    Buffers start at zero, which gives torch's first step (v = g) without a special case. A parameter in `rates` learns
    at a multiple of lr, and is decayed as fast as the others: rate x decay is the same.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        path: Path = "foreach",
        rates: Mapping[str, float] | None = None,
    ) -> None:
        super().__init__(groups, {MOMENTUM: 0.0} if momentum else {}, rates)
        self._momentum = momentum
        self._nesterov = nesterov
        self._weight_decay = weight_decay
        self._path = path

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or nothing at all when not ok."""
        for group in self.groups():
            descend(
                group.params,
                group.grads,
                group.slots.get(MOMENTUM, []),
                lr * group.rate,
                self._weight_decay / group.rate if group.is_decayed else 0.0,
                ok,
                momentum=self._momentum,
                nesterov=self._nesterov,
                path=self._path,
            )


def descend(
    params: list[Tensor],
    grads: list[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    decay: float,
    ok: Tensor,
    *,
    momentum: float,
    nesterov: bool,
    path: Path,
) -> None:
    """Decay, momentum and step for a list of tensors, by one kernel for all, by foreach operations, or by a vendor."""
    if isinstance(path, VendorDescent):
        path(params, buffers, lr, decay, ok, momentum=momentum, nesterov=nesterov)
        return
    if path == "fused":
        descend_fused(params, grads, buffers, lr, decay, ok, momentum=momentum, nesterov=nesterov)
        return
    if decay:
        grads = list(torch._foreach_add(grads, params, alpha=decay))
    if buffers:
        moved = torch._foreach_mul(buffers, momentum)
        torch._foreach_add_(moved, grads)
        grads = list(torch._foreach_add(grads, moved, alpha=momentum)) if nesterov else list(moved)
        commit(moved, buffers, ok)
    commit(moved_by(params, grads, lr), params, ok)


def moved_by(params: list[Tensor], moves: list[Tensor], lr: float | Tensor) -> Sequence[Tensor]:
    """The parameters against their moves, times the rate."""
    if isinstance(lr, Tensor):
        return torch._foreach_sub(params, scaled(moves, lr))
    return torch._foreach_add(params, moves, alpha=-lr)
