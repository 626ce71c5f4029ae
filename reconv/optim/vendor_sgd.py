"""SGD by a device vendor's own optimizer class, which has the interface of torch.optim.SGD."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reconv.optim.optimizer import copy_if_ok

SGDClass = Callable[..., torch.optim.Optimizer]
_BUFFER = "momentum_buffer"  # torch.optim.SGD's key for it, which vendors keep


class VendorSGD:
    """Calls one vendor optimizer for each list of parameters that is updated together.

    Weights and momentum stay in our tensors, so checkpoints do not depend on which implementation updated them.
    """

    def __init__(self, sgd_class: SGDClass) -> None:
        self._class = sgd_class
        self._optimizers: dict[tuple[int, ...], torch.optim.Optimizer] = {}

    def __call__(
        self,
        params: list[Tensor],
        momentum_buffers: list[Tensor],
        lr: float | Tensor,
        weight_decay: float,
        ok: Tensor,
        *,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Weight decay, momentum and step with the parameters' own gradients; changes nothing if not ok."""
        key = tuple(map(id, params))
        if key not in self._optimizers:
            self._optimizers[key] = self._class(
                params, lr=lr, momentum=momentum, dampening=0, weight_decay=weight_decay, nesterov=nesterov
            )
        optimizer = self._optimizers[key]
        optimizer.param_groups[0]["lr"] = lr
        for parameter, buffer in zip(params, momentum_buffers, strict=bool(momentum_buffers)):
            optimizer.state[parameter][_BUFFER] = buffer
        updated = [*params, *momentum_buffers]
        before = [tensor.detach().clone() for tensor in updated]
        optimizer.step()
        buffers = [optimizer.state[parameter][_BUFFER] for parameter in params] if momentum_buffers else []
        copy_if_ok([*params, *buffers], before, ok)
        torch._foreach_copy_(updated, before)
