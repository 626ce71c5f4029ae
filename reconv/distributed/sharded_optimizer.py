"""Optimizer state divided over processes: each updates its share of the parameters and tells the others.

Owns who has which parameter, and the meeting after an update and before a save. Refuses to know any update rule.
Invariant: weights and saved state are bitwise those of an optimizer that every process has whole, so that a checkpoint
tells nothing of shares and any number of processes goes on from it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor


class ShardableOptimizer(Protocol):
    """An optimizer over some of the parameters."""

    def step(self, lr: float | Tensor, ok: Tensor) -> None: ...
    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: Mapping[str, Tensor]) -> None: ...


def owners(sizes: Mapping[str, int], num_ranks: int) -> dict[str, int]:
    """Who has which parameter: the largest first, each to whoever has least so far."""
    loads = [0] * num_ranks
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += sizes[name]
    return owner


class OptimizerShards:
    """The optimizer of all parameters, as one of the processes that share it."""

    def __init__(
        self, inner: ShardableOptimizer, parameters: Mapping[str, Tensor], owner: Mapping[str, int], rank: int
    ) -> None:
        """`inner` has this rank's parameters; `parameters` are all, in the order of a whole optimizer."""
        self._inner = inner
        self._parameters = parameters
        self._owner = owner
        self._rank = rank

    def grads(self) -> list[Tensor]:
        """The gradients of all parameters: their norm is that of the whole network."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update one's own parameters and take the others' from their owners."""
        self._inner.step(lr, ok)
        for owner, tensors in self._by_owner().items():
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.broadcast(flat, owner)
            if owner != self._rank:
                for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _by_owner(self) -> dict[int, list[Tensor]]:
        held: dict[int, list[Tensor]] = {}
        for name, parameter in self._parameters.items():
            held.setdefault(self._owner[name], []).append(parameter)
        return held

    def state(self) -> dict[str, Tensor]:
        """The state of all parameters, on the host of rank 0; all processes ask, one tensor travels at a time."""
        gathered: list[Sequence[tuple[str, torch.Size, torch.dtype]]] = [()] * dist.get_world_size()
        own = self._inner.state()
        dist.all_gather_object(gathered, [(name, t.shape, t.dtype) for name, t in own.items()])
        whole: dict[str, Tensor] = {}
        device = next(iter(self._parameters.values())).device
        for owner, described in enumerate(gathered):
            for name, shape, dtype in described:
                mine = owner == self._rank
                tensor = own[name].to(device).contiguous() if mine else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, owner)
                if self._rank == 0:
                    whole[name] = tensor.cpu()
        return whole

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over one's own part of a whole state."""
        self._inner.restore({name: state[name] for name in self._inner.state() if name in state})
