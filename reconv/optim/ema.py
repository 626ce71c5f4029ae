"""A moving average of a network's weights and buffers.

Owns the averaged copy. Refuses to know who evaluates it. Invariant: every tensor of the network's state is either
averaged (floats) or copied (counters); none is left behind. Averages of half-precision weights are float32: their
moves are smaller than a step of the weights' own type.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from reconv.errors import CheckpointError
from reconv.optim.fused import approach_fused
from reconv.precision import at_least_float32
from reconv.precision.accumulate import wide


class ModelEma:
    """average = d * average + (1 - d) * weights, with d = min(decay, (1 + t) / (10 + t)) when ramped."""

    def __init__(self, model: nn.Module, decay: float, ramp: bool = True, *, is_fused: bool | None = None) -> None:
        """`is_fused`: moved in one pass; None: where all lies on a GPU in the averages' type, other bits stay."""
        self._decay = decay
        self._ramp = ramp
        self.model = at_least_float32(copy.deepcopy(model).eval().requires_grad_(False))
        current, averaged = model.state_dict(keep_vars=True), self.model.state_dict()
        assert list(current) == list(averaged), "the copy has other tensors than the network"
        self._floats: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
        self._others: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, tensor in current.items():
            dtype = averaged[name].dtype
            pair = self._floats.setdefault(dtype, ([], [])) if dtype.is_floating_point else self._others
            pair[0].append(averaged[name])
            pair[1].append(tensor.detach())
        num_paired = sum(len(pair[0]) for pair in (*self._floats.values(), self._others))
        assert num_paired == len(current), "a tensor would be neither averaged nor copied"
        pairs = [pair for lists in self._floats.values() for pair in zip(*lists, strict=True)]
        can_be = all(average.is_cuda and average.dtype == value.dtype for average, value in pairs)
        self._is_fused = can_be if is_fused is None else is_fused

    def decay_at(self, step: int) -> float:
        """The share of the old average at a step, counted from 0."""
        return min(self._decay, (1 + step) / (10 + step)) if self._ramp else self._decay

    def share_at(self, step: int) -> float:
        """The share of the network in the new average."""
        return 1 - self.decay_at(step)

    @torch.no_grad()
    def update(self, share: float | Tensor, ok: Tensor) -> None:
        """Move towards the network by a share, or not at all when the step is not ok.

        A step that is not ok has left the network finite and unchanged, so a weight of zero is gate enough.
        """
        if self._is_fused:
            for averages, values in self._floats.values():
                approach_fused(averages, values, share, ok)
        else:
            self._update_floats(wide(ok) * share)
        if self._others[0]:
            torch._foreach_copy_(*self._others)

    def _update_floats(self, share: Tensor) -> None:
        for dtype, (averages, values) in self._floats.items():
            moves = torch._foreach_sub(values, averages)
            torch._foreach_mul_(moves, share.to(dtype))
            torch._foreach_add_(averages, moves)

    def state(self) -> dict[str, Tensor]:
        """The averaged network's tensors."""
        return dict(self.model.state_dict())

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over a saved average, in our own strides."""
        own = self.model.state_dict()
        if set(own) != set(state):
            raise CheckpointError(
                "the saved average is not this network's",
                why=f"missing: {sorted(set(own) - set(state))[:3]}, unexpected: {sorted(set(state) - set(own))[:3]}",
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"the saved average {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(state[name])
