"""The exponential moving average (EMA) of a model's weights and buffers."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn

from reconv.core.errors import CheckpointError
from reconv.optim.optimizer import fused_lerp
from reconv.precision import at_least_float32
from reconv.precision.policy import to_accumulate_dtype


class ModelEma:
    """Exponential moving average of a model's weights.

    ema = d * ema + (1 - d) * weights, with d = min(decay, (1 + step) / (10 + step)) under warmup.

    Floating-point tensors are averaged, others (counters) copied. The EMA of half-precision weights is float32: its
    updates are smaller than the spacing of the weights' own dtype.
    """

    def __init__(self, model: nn.Module, decay: float, warmup: bool = True, *, is_fused: bool | None = None) -> None:
        """`is_fused`: update by one kernel; None: on a GPU, where the EMA has the dtype of the weights."""
        self._decay = decay
        self._warmup = warmup
        self.model = at_least_float32(copy.deepcopy(model).eval().requires_grad_(False))
        current, averaged = model.state_dict(keep_vars=True), self.model.state_dict()
        assert list(current) == list(averaged), "the copy has other tensors than the model"
        self._floats: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}  # EMA tensors, model tensors
        self._others: tuple[list[Tensor], list[Tensor]] = ([], [])
        for name, tensor in current.items():
            dtype = averaged[name].dtype
            pair = self._floats.setdefault(dtype, ([], [])) if dtype.is_floating_point else self._others
            pair[0].append(averaged[name])
            pair[1].append(tensor.detach())
        pairs = [pair for lists in self._floats.values() for pair in zip(*lists, strict=True)]
        can_be_fused = all(ema.is_cuda and ema.dtype == value.dtype for ema, value in pairs)
        self._is_fused = can_be_fused if is_fused is None else is_fused

    def decay_at(self, step: int) -> float:
        """The weight of the old EMA at a step, counted from 0."""
        return min(self._decay, (1 + step) / (10 + step)) if self._warmup else self._decay

    def weight_at(self, step: int) -> float:
        """The weight of the model in the new EMA."""
        return 1 - self.decay_at(step)

    @torch.no_grad()
    def update(self, weight: float | Tensor, ok: Tensor) -> None:
        """Move the EMA towards the model by a weight, or not at all if the step is not ok.

        A step that is not ok has left the model finite and unchanged, so a weight of zero is enough of a gate.
        """
        if self._is_fused:
            for averages, values in self._floats.values():
                fused_lerp(averages, values, weight, ok)
        else:
            self._lerp(to_accumulate_dtype(ok) * weight)
        if self._others[0]:
            torch._foreach_copy_(*self._others)

    def _lerp(self, weight: Tensor) -> None:
        for dtype, (averages, values) in self._floats.items():
            differences = torch._foreach_sub(values, averages)
            torch._foreach_mul_(differences, weight.to(dtype))
            torch._foreach_add_(averages, differences)

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self.model.state_dict())

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Copy a saved EMA into place, keeping our strides."""
        own = self.model.state_dict()
        if set(own) != set(state):
            raise CheckpointError(
                "the EMA weights in the checkpoint do not match the model",
                why=f"missing: {sorted(set(own) - set(state))[:3]}, unexpected: {sorted(set(state) - set(own))[:3]}",
            )
        for name, tensor in own.items():
            if tensor.shape != state[name].shape:
                raise CheckpointError(
                    f"the saved EMA of {name} has shape {tuple(state[name].shape)}, not {tuple(tensor.shape)}"
                )
            tensor.copy_(state[name])
