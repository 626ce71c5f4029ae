"""Stochastic gradient descent with momentum, gated on the device.

Owns the momentum buffers. Refuses to know schedules: the learning rate comes with each step. Invariant: a step that
is not ok changes neither weights nor momentum, and nobody on the host has to know in time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor

from reconv.errors import CheckpointError
from reconv.optim.decay import DecayGroups

Path = Literal["foreach", "fused"]


class SGD:
    """torch.optim.SGD's mathematics: g += decay * w; v = momentum * v + g; w -= lr * v (or g + momentum * v).

    Buffers start at zero, which gives torch's first step (v = g) without a special case.
    """

    def __init__(
        self, groups: DecayGroups, *, momentum: float, nesterov: bool, weight_decay: float, path: Path = "foreach"
    ) -> None:
        self._groups = [(groups.decayed, weight_decay), (groups.free, 0.0)]
        self._momentum = momentum
        self._nesterov = nesterov
        self._path = path
        # zeros_like keeps the parameter's strides, and restoring copies into these very tensors: the fused kernel
        # on CPU walks memory and computes garbage, silently, when strides differ.
        self._buffers = {
            name: torch.zeros_like(parameter, requires_grad=False)
            for parameters, _ in self._groups
            for name, parameter in parameters.items()
            if momentum
        }

    def grads(self) -> list[Tensor]:
        """The gradients that exist, in the network's order within decayed and free."""
        return [p.grad for parameters, _ in self._groups for p in parameters.values() if p.grad is not None]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameters, _ in self._groups:
            for parameter in parameters.values():
                parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or nothing at all when not ok."""
        for parameters, weight_decay in self._groups:
            with_grad = {name: p for name, p in parameters.items() if p.grad is not None}
            if not with_grad:
                continue
            params: list[Tensor] = list(with_grad.values())
            grads = [p.grad for p in params if p.grad is not None]
            buffers = [self._buffers[name] for name in with_grad] if self._momentum else []
            if self._path == "fused":
                self._fused(params, grads, buffers, lr, weight_decay, ok)
            else:
                self._foreach(params, grads, buffers, lr, weight_decay, ok)

    def _foreach(
        self, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], lr: float, decay: float, ok: Tensor
    ) -> None:
        """The reference: new values first, then each is kept or not."""
        if decay:
            grads = list(torch._foreach_add(grads, params, alpha=decay))
        if buffers:
            moved = torch._foreach_mul(buffers, self._momentum)
            torch._foreach_add_(moved, grads)
            grads = list(torch._foreach_add(grads, moved, alpha=self._momentum)) if self._nesterov else list(moved)
            torch._foreach_copy_(buffers, [torch.where(ok, m, b) for m, b in zip(moved, buffers, strict=True)])
        stepped = torch._foreach_add(params, grads, alpha=-lr)
        torch._foreach_copy_(params, [torch.where(ok, s, p) for s, p in zip(stepped, params, strict=True)])

    def _fused(
        self, params: list[Tensor], grads: list[Tensor], buffers: list[Tensor], lr: float, decay: float, ok: Tensor
    ) -> None:
        """One kernel for all tensors; torch's own gate for loss scaling serves as ours."""
        grads = [_with_strides(g, p) for g, p in zip(grads, params, strict=True)]
        torch._fused_sgd_(
            params,
            grads,
            buffers,
            weight_decay=decay,
            momentum=self._momentum,
            lr=lr,
            dampening=0.0,
            nesterov=self._nesterov,
            maximize=False,
            is_first_step=False,
            grad_scale=None,
            found_inf=(~ok).to(torch.float32),
        )

    def state(self) -> dict[str, Tensor]:
        """The momentum buffers under their parameters' names."""
        return {f"momentum.{name}": buffer for name, buffer in self._buffers.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved buffers, in the strides of our own."""
        expected = self.state()
        if set(state) != set(expected):
            missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
            raise CheckpointError(
                "the saved optimizer state is not this network's",
                why=f"missing: {missing[:3]}, unexpected: {unexpected[:3]}",
            )
        for name, buffer in expected.items():
            if buffer.shape != state[name].shape:
                raise CheckpointError(
                    f"the saved optimizer state {name} has shape {tuple(state[name].shape)}, not {tuple(buffer.shape)}"
                )
            buffer.copy_(state[name])


def _with_strides(grad: Tensor, parameter: Tensor) -> Tensor:
    """The gradient in its parameter's layout; autograd gives nothing else, a reducer might."""
    if grad.stride() == parameter.stride():
        return grad
    return torch.empty_like(parameter).copy_(grad)
