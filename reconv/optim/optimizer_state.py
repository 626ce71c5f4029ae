"""What every optimizer keeps: parameters in decay groups, and tensors of state beside each of them.

Owns gradients' access, the state's names and its saving. Refuses to know any update rule. Invariant: a state tensor
has its parameter's shape, type and strides for as long as it lives: the fused kernels on CPU walk memory and compute
garbage, silently, when strides differ.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reconv.errors import CheckpointError
from reconv.optim.param_groups import DecayGroups

_TRAVELLING_BYTES = 64 << 20  # of one slot


@dataclass(frozen=True, slots=True)
class ParamGroup:
    """The parameters of one decay group that have a gradient, and what belongs to each, in the same order."""

    params: list[Tensor]
    grads: list[Tensor]
    slots: dict[str, list[Tensor]]  # by the name of the slot
    is_decayed: bool
    rate: float = 1.0  # times the learning rate


class OptimizerState:
    """Parameters by name, and one tensor per slot (momentum, mean square) for each of them."""

    def __init__(
        self, groups: DecayGroups, initial: Mapping[str, float], rates: Mapping[str, float] | None = None
    ) -> None:
        """`rates` are the parameters that learn at a multiple of the rate."""
        self._rates = rates or {}
        self._groups = [(groups.decayed, True), (groups.free, False)]
        self._tensors = {
            slot: {
                name: torch.full_like(parameter, value, requires_grad=False)
                for parameters, _ in self._groups
                for name, parameter in parameters.items()
            }
            for slot, value in initial.items()
        }
        self._home: torch.device | None = None  # of the parameters, where state lies on the host instead

    def offload(self) -> None:
        """Keep state in the host's memory; it travels to the parameters for each update and back, some at a time."""
        some = [tensor for tensors in self._tensors.values() for tensor in tensors.values()]
        self._home = some[0].device if some else None
        for tensors in self._tensors.values():
            for name, tensor in tensors.items():
                host = torch.empty_like(tensor, device="cpu", pin_memory=tensor.device.type == "cuda")
                tensors[name] = host.copy_(tensor)

    def grads(self) -> list[Tensor]:
        """The gradients that exist, in the network's order within decayed and free."""
        return [p.grad for parameters, _ in self._groups for p in parameters.values() if p.grad is not None]

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameters, _ in self._groups:
            for parameter in parameters.values():
                parameter.grad = None

    def groups(self) -> Iterator[ParamGroup]:
        """The parameters with gradients, each decay group by rate."""
        for parameters, is_decayed in self._groups:
            by_rate: dict[float, list[str]] = {}
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    by_rate.setdefault(self._rates.get(name, 1.0), []).append(name)
            for rate, all_names in by_rate.items():
                for names in [all_names] if self._home is None else self._chunks(all_names, parameters):
                    params = [parameters[name] for name in names]
                    grads = [p.grad for p in params if p.grad is not None]
                    slots = {slot: [tensors[name] for name in names] for slot, tensors in self._tensors.items()}
                    here = {slot: [self._travelled(t) for t in tensors] for slot, tensors in slots.items()}
                    yield ParamGroup(list(params), grads, here, is_decayed, rate)
                    if self._home is not None:
                        for slot, tensors in slots.items():
                            for host, moved in zip(tensors, here[slot], strict=True):
                                host.copy_(moved, non_blocking=True)

    def _travelled(self, tensor: Tensor) -> Tensor:
        """State where the parameters are, in its own strides."""
        if self._home is None:
            return tensor
        return torch.empty_like(tensor, device=self._home, pin_memory=False).copy_(tensor, non_blocking=True)

    def _chunks(self, names: Sequence[str], parameters: Mapping[str, Tensor]) -> Iterator[list[str]]:
        """The names, as many at a time as fit into what travels at once, at least one."""
        chunk: list[str] = []
        for name in names:
            if chunk and sum(parameters[n].nbytes for n in (*chunk, name)) > _TRAVELLING_BYTES:
                yield chunk
                chunk = []
            chunk.append(name)
        if chunk:
            yield chunk

    def state(self) -> dict[str, Tensor]:
        """Every slot under its own and its parameter's name."""
        return {f"{slot}.{name}": t for slot, tensors in self._tensors.items() for name, t in tensors.items()}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over saved slots, in the strides of our own."""
        expected = self.state()
        if set(state) != set(expected):
            missing, unexpected = sorted(set(expected) - set(state)), sorted(set(state) - set(expected))
            raise CheckpointError(
                "the saved optimizer state is not this network's",
                why=f"missing: {missing[:3]}, unexpected: {unexpected[:3]}",
            )
        for name, tensor in expected.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"the saved optimizer state {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(state[name])


def scaled(tensors: Sequence[Tensor], factor: float | Tensor) -> list[Tensor]:
    """Every tensor times a number, given by the host or lying on the device."""
    factor = factor.to(tensors[0].dtype) if isinstance(factor, Tensor) else factor
    return list(torch._foreach_mul(list(tensors), factor))


def commit(new: Sequence[Tensor], old: Sequence[Tensor], ok: Tensor) -> None:
    """Put new values in the place of old ones, or leave those as they are when not ok; nothing is read back."""
    if old and old[0].is_cuda and all(n.stride() == o.stride() for n, o in zip(new, old, strict=True)):
        # One choice for all: hundreds of small ones took a twentieth of an EfficientNet's step on an H200.
        chosen = torch.where(ok, _end_to_end(new), _end_to_end(old)).split([o.numel() for o in old])
        torch._foreach_copy_([_flat(o) for o in old], list(chosen))
        return
    torch._foreach_copy_(list(old), [torch.where(ok, n, o) for n, o in zip(new, old, strict=True)])


def _end_to_end(tensors: Sequence[Tensor]) -> Tensor:
    """All values, in the order of memory."""
    return torch.cat([_flat(t) for t in tensors])


def _flat(tensor: Tensor) -> Tensor:
    """The memory of a tensor without holes, whatever its layout."""
    return tensor.as_strided((tensor.numel(),), (1,))
