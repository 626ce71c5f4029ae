"""Updates of many tensors in few kernel launches, by torch's fused kernels, gated on the device by `ok`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


def fused_sgd(
    params: list[Tensor],
    grads: Sequence[Tensor],
    momentum_buffers: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    ok: Tensor,
    *,
    momentum: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Weight decay, momentum and step, in place; changes nothing if not ok."""
    torch._fused_sgd_(
        params,
        [match_strides(g, p) for g, p in zip(grads, params, strict=True)],
        momentum_buffers,
        weight_decay=weight_decay,
        momentum=momentum,
        lr=lr.float() if isinstance(lr, Tensor) else lr,
        dampening=0.0,
        nesterov=nesterov,
        maximize=maximize,
        is_first_step=False,
        grad_scale=None,
        found_inf=_found_inf(ok),  # the kernel's gate for loss scaling serves as ours
    )


def fused_lerp(values: list[Tensor], targets: Sequence[Tensor], weight: float | Tensor, ok: Tensor) -> None:
    """values += weight * (targets - values), in place: gradient ascent with a weight decay of 1."""
    fused_sgd(values, targets, [], weight, 1.0, ok, maximize=True)


def fused_adamw(
    params: list[Tensor],
    grads: Sequence[Tensor],
    exp_avgs: list[Tensor],
    exp_avg_sqs: list[Tensor],
    steps: list[Tensor],
    lr: float | Tensor,
    weight_decay: float,
    ok: Tensor,
    *,
    betas: tuple[float, float],
    epsilon: float,
) -> None:
    """AdamW, in place; changes nothing if not ok. `steps` has a float32 counter for each parameter."""
    found_inf = _found_inf(ok)
    torch._foreach_add_(steps, 1)
    torch._fused_adamw_(
        params,
        [match_strides(g, p) for g, p in zip(grads, params, strict=True)],
        exp_avgs,
        exp_avg_sqs,
        [],
        steps,
        lr=_kernel_lr(lr, params[0]),
        beta1=betas[0],
        beta2=betas[1],
        weight_decay=weight_decay,
        eps=epsilon,
        amsgrad=False,
        maximize=False,
        grad_scale=None,
        found_inf=found_inf,
    )
    torch._foreach_sub_(steps, [found_inf] * len(steps))


def _found_inf(ok: Tensor) -> Tensor:
    """1.0 if not ok, else 0.0: negated and cast in one kernel launch."""
    return torch.logical_not(ok, out=torch.empty_like(ok, dtype=torch.float32))


def _kernel_lr(lr: float | Tensor, like: Tensor) -> float | Tensor:
    """The learning rate for a kernel: on CUDA in float32, so that an eager step equals a captured one."""
    if not like.is_cuda:
        return lr
    return lr.float() if isinstance(lr, Tensor) else float(np.float32(lr))


def match_strides(tensor: Tensor, like: Tensor) -> Tensor:
    """The tensor with the strides of another, copied only if they differ in a dimension larger than 1."""
    dims = zip(like.shape, tensor.stride(), like.stride(), strict=True)
    if all(size == 1 or own == other for size, own, other in dims):
        return tensor
    return torch.empty_like(like).copy_(tensor)
