"""Descent by a vendor's own optimizer, called like torch.optim.SGD.

Owns the bridge: our momentum becomes the vendor's, its step is gated like ours. Refuses to know the vendor.
Invariant: weights and momentum lie where they always lie, so a checkpoint does not tell who stepped; a step that is
not ok leaves them as they were, and the host need not know.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from reconv.optim.optimizer_state import commit

MakeSgd = Callable[..., torch.optim.Optimizer]
_BUFFER = "momentum_buffer"  # torch.optim.SGD's name for it, which vendors keep


class VendorDescent:
    """One of the vendor's optimizers for each list of parameters that descends together."""

    def __init__(self, make: MakeSgd) -> None:
        self._make = make
        self._made: dict[tuple[int, ...], torch.optim.Optimizer] = {}

    def __call__(
        self,
        params: list[Tensor],
        buffers: list[Tensor],
        lr: float | Tensor,
        decay: float,
        ok: Tensor,
        *,
        momentum: float,
        nesterov: bool,
    ) -> None:
        """Decay, momentum and step by the gradients that the parameters hold."""
        key = tuple(map(id, params))
        if key not in self._made:
            self._made[key] = self._make(
                params, lr=lr, momentum=momentum, dampening=0, weight_decay=decay, nesterov=nesterov
            )
        optimizer = self._made[key]
        optimizer.param_groups[0]["lr"] = lr
        for parameter, buffer in zip(params, buffers, strict=bool(buffers)):
            optimizer.state[parameter][_BUFFER] = buffer
        places = [*params, *buffers]
        before = [place.detach().clone() for place in places]
        optimizer.step()
        moved = [optimizer.state[parameter][_BUFFER] for parameter in params] if buffers else []
        commit([*params, *moved], before, ok)
        torch._foreach_copy_(places, before)
