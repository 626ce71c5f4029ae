"""Optimizer state sharded over the ranks: each rank updates its own parameters and broadcasts them to the others.

Weights and saved state are bitwise those of an unsharded optimizer, so a checkpoint can be resumed with any world size.

A shard is whole parameters, and state is gathered for a checkpoint (tests/laws/test_law_optimizer_memory.py).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from reconv.distributed import collectives
from reconv.optim.optimizer import Optimizer


def shard_owners(sizes: Mapping[str, int], world_size: int) -> dict[str, int]:
    """The rank that owns each parameter: largest parameters first, each to the rank with the least so far."""
    loads = [0] * world_size
    owner = {}
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        owner[name] = loads.index(min(loads))
        loads[owner[name]] += sizes[name]
    return owner


class ShardedOptimizer:
    """An optimizer of all parameters, of which this rank steps its own shard."""

    def __init__(self, shard: Optimizer, parameters: Mapping[str, Tensor], owner: Mapping[str, int], rank: int) -> None:
        """`shard` has this rank's parameters; `parameters` are those of all ranks, in the unsharded order."""
        self._shard = shard
        self._parameters = parameters
        self._owner = owner
        self._rank = rank

    def grads(self) -> list[Tensor]:
        """The gradients of all parameters, so that their norm is that of the whole model."""
        return [p.grad for p in self._parameters.values() if p.grad is not None]

    def params_with_grad(self) -> dict[str, Tensor]:
        """The parameters of all ranks that have a gradient, by name."""
        return {name: p for name, p in self._parameters.items() if p.grad is not None}

    def zero_grad(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update this rank's parameters and receive the others from their owners."""
        self._shard.step(lr, ok)
        for owner, tensors in self._by_owner().items():
            flat = torch.cat([t.reshape(-1) for t in tensors])
            dist.broadcast(flat, owner)
            if owner != self._rank:
                for tensor, part in zip(tensors, flat.split([t.numel() for t in tensors]), strict=True):
                    tensor.copy_(part.view(tensor.shape))

    def _by_owner(self) -> dict[int, list[Tensor]]:
        owned: dict[int, list[Tensor]] = {}
        for name, parameter in self._parameters.items():
            owned.setdefault(self._owner[name], []).append(parameter)
        return owned

    def state_dict(self) -> dict[str, Tensor]:
        """The state of all parameters, in host memory of rank 0; called by all ranks, sent one tensor at a time."""
        own = self._shard.state_dict()
        gathered = collectives.all_gather([(name, t.shape, t.dtype) for name, t in own.items()])
        full: dict[str, Tensor] = {}
        device = next(iter(self._parameters.values())).device
        for owner, described in enumerate(gathered):
            for name, shape, dtype in described:
                is_own = owner == self._rank
                tensor = own[name].to(device).contiguous() if is_own else torch.empty(shape, dtype=dtype, device=device)
                dist.broadcast(tensor, owner)
                if self._rank == 0:
                    full[name] = tensor.cpu()
        return full

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Take this rank's shard of a full state."""
        self._shard.load_state_dict({name: state[name] for name in self._shard.state_dict() if name in state})
