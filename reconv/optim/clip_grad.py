"""Gradient clipping: by the norm of the whole gradient, by value, or adaptively (AGC: Brock et al., 2021).

The modes are those of timm's `--clip-mode`.

Gradients are clipped when all ranks hold the whole gradient: after accumulation, reduction and unscaling
(tests/laws/test_law_clip_grad.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

_NORM_EPS = 1e-6  # as in torch.nn.utils.clip_grad_norm_ and in timm
_WEIGHT_NORM_EPS = 1e-3  # of AGC: weights of zero can still be trained


@dataclass(frozen=True, slots=True)
class ClipGrad:
    """Clips the gradients of a step.

    norm: g * min(1, value / |all g|), as torch's clip_grad_norm_. value: each number to [-value, value].
    agc: the norm of each output unit's gradient to value * that of its weights, except in the head (`agc_exclude`).
    """

    mode: Literal["norm", "value", "agc"]
    value: float
    agc_exclude: frozenset[str] = frozenset()

    @torch.no_grad()
    def __call__(self, params: Mapping[str, Tensor], grad_norm: Tensor) -> None:
        """Clip the gradients of parameters in place; `grad_norm` is the norm of all of them together."""
        grads = {name: p.grad for name, p in params.items() if p.grad is not None}
        if self.mode == "norm":
            factor = (self.value / (grad_norm + _NORM_EPS)).clamp(max=1.0)
            torch._foreach_mul_(list(grads.values()), factor)
        elif self.mode == "value":
            torch._foreach_clamp_min_(list(grads.values()), -self.value)
            torch._foreach_clamp_max_(list(grads.values()), self.value)
        else:
            for name, grad in grads.items():
                if name not in self.agc_exclude:
                    _clip_adaptively(params[name], grad, self.value)


def _clip_adaptively(param: Tensor, grad: Tensor, clip_factor: float) -> None:
    """Shrink the gradient of each unit whose norm exceeds clip_factor times that of the unit's weights."""
    max_norm = _unit_norms(param).clamp(min=_WEIGHT_NORM_EPS) * clip_factor
    grad_norm = _unit_norms(grad)
    grad.mul_(torch.where(grad_norm < max_norm, 1.0, max_norm / grad_norm.clamp(min=_NORM_EPS)))


def _unit_norms(tensor: Tensor) -> Tensor:
    """The norm over all dimensions but the first, which is that of output channels; of a vector, its norm."""
    dims = tuple(range(1, tensor.ndim)) or None
    norms: Tensor = torch.linalg.vector_norm(tensor, dim=dims, keepdim=dims is not None)
    return norms
