"""LARS: momentum with a learning rate of its own for every layer (You, Gitman and Ginsburg, 2017).

Owns the trust ratio, in the form of the TensorFlow reference: the rate goes into the gradient before momentum.
Refuses to know schedules. Invariant: weight decay acts once, on the adapted parameters alone, and norms are never
read by the host.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.optim.optimizer_state import OptimizerState, scaled
from reconv.optim.param_groups import DecayGroups
from reconv.optim.sgd import MOMENTUM, Path, descend


class LARS(OptimizerState):
    """r = trust * |w| / (|g| + decay * |w| + epsilon), 1 where either norm is 0; v = momentum * v + lr * r * (g +
    decay * w); w -= v. Skipped parameters (the free group) have r = 1 and no decay.
    """

    def __init__(
        self,
        groups: DecayGroups,
        *,
        momentum: float,
        nesterov: bool,
        weight_decay: float,
        trust: float,
        epsilon: float,
        path: Path = "foreach",
    ) -> None:
        super().__init__(groups, {MOMENTUM: 0.0} if momentum else {})
        self._momentum = momentum
        self._nesterov = nesterov
        self._weight_decay = weight_decay
        self._trust = trust
        self._epsilon = epsilon
        self._path = path

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or nothing at all when not ok."""
        for group in self.groups():
            grads = self._adapted(group.params, group.grads, lr) if group.is_decayed else scaled(group.grads, lr)
            # The rate is in the gradients already, and so is the decay.
            descend(
                group.params,
                grads,
                group.slots.get(MOMENTUM, []),
                1.0,
                0.0,
                ok,
                momentum=self._momentum,
                nesterov=self._nesterov,
                path=self._path,
            )

    def _adapted(self, params: list[Tensor], grads: list[Tensor], lr: float | Tensor) -> list[Tensor]:
        """Decayed gradients times the rate of their layer."""
        weight_norms, grad_norms = _norms(params), _norms(grads)
        ratios = self._trust * weight_norms / (grad_norms + self._weight_decay * weight_norms + self._epsilon)
        rates = lr * torch.where((weight_norms > 0) & (grad_norms > 0), ratios, 1.0)
        decayed = torch._foreach_add(grads, params, alpha=self._weight_decay)
        return list(torch._foreach_mul(decayed, list(rates.to(params[0].dtype).unbind())))


def _norms(tensors: list[Tensor]) -> Tensor:
    """The norm of each tensor, in at least fp32."""
    dtype = torch.promote_types(tensors[0].dtype, torch.float32)
    return torch.stack([norm.to(dtype) for norm in torch._foreach_norm(tensors, 2, dtype=dtype)])
