"""Updates of many tensors in few launches, by torch's fused descent, gated on the device.

Owns what that kernel is asked for. Refuses to know update rules. Invariant: an update that is not ok changes no bit of
what it would update, whatever it was given, and nobody on the host has to know in time.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def descend_fused(
    params: list[Tensor],
    grads: Sequence[Tensor],
    buffers: list[Tensor],
    lr: float | Tensor,
    decay: float,
    ok: Tensor,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Decay, momentum and step, in place."""
    torch._fused_sgd_(
        params,
        [with_strides(g, p) for g, p in zip(grads, params, strict=True)],
        buffers,
        weight_decay=decay,
        momentum=momentum,
        lr=lr.float() if isinstance(lr, Tensor) else lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
        grad_scale=None,
        found_inf=(~ok).to(torch.float32),  # torch's own gate for loss scaling serves as ours
    )


def approach_fused(values: list[Tensor], targets: Sequence[Tensor], share: float | Tensor, ok: Tensor) -> None:
    """Move values towards targets by a share of the way, in place: v += share * (t - v), ascent with a decay of one."""
    descend_fused(values, targets, [], share, 1.0, ok, maximize=True)


def with_strides(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor in the other's layout; gradients have it but where a reducer changed it. Sides of one have none."""
    sides = zip(like.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or mine == theirs for size, mine, theirs in sides):
        return tensor
    return torch.empty_like(like).copy_(tensor)
