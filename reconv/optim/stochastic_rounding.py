"""Half-precision weights without float32 master copies: updates are computed in float32 and rounded when stored.

Stochastic rounding uses random numbers that are a hash of (seed, step, parameter, element). A step that is not ok
changes no bit: weights that are representable in half precision are rounded to themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from reconv.core import random as keys
from reconv.core.errors import CheckpointError
from reconv.models.layers.dropout import splitmix64, to_int64, uniform_from_keys
from reconv.optim.optimizer import BaseOptimizer
from reconv.optim.param_groups import DecayGroups

STEP = "rounding.step"
_CHUNK = 2**22  # elements rounded at a time: few kernels, and temporaries of tens of megabytes


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of an updated weight to half precision: to nearest, or stochastically without bias."""

    is_stochastic: bool
    seed: int = 0


def round_stochastic(values: Tensor, uniform: Tensor) -> Tensor:
    """Round float32 values to float16, up or down with the probability that keeps the mean; `uniform` is in [0, 1).

    Values that float16 represents exactly, infinities and NaNs are unchanged.
    """
    exponents = ((values.contiguous().view(torch.int32) >> 23) & 0xFF) - 127
    # The spacing of float16: ten bits below the leading one, and 2^-24 below 2^-14.
    spacing = ((exponents.clamp(min=-14) - 10 + 127) << 23).view(torch.float32)
    steps = values / spacing  # exact: a division by a power of two
    below = steps.floor()
    return ((below + (uniform < steps - below)) * spacing).to(torch.float16)


def float32_groups(groups: DecayGroups) -> DecayGroups:
    """Float32 parameters of the same names and shapes, uninitialized: they get their values before each update."""

    def float32(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False)
            for name, p in parameters.items()
        }

    return DecayGroups(float32(groups.decay), float32(groups.no_decay))


class HalfPrecisionOptimizer:
    """An optimizer of half-precision parameters: convert to float32, let the inner optimizer step, round."""

    def __init__(self, half: DecayGroups, float32: DecayGroups, inner: BaseOptimizer, rounding: Rounding) -> None:
        """`inner` optimizes the parameters of `float32`, which exist only during an update."""
        self._half = half.all()
        self._float32 = float32.all()
        self._inner = inner
        self._is_stochastic = rounding.is_stochastic
        device = next(iter(self._half.values())).device
        self._step = torch.zeros((), dtype=torch.int64, device=device)  # on the device: the host need not know it
        self._chunks = list(_chunks(self._half, keys.key(rounding.seed, "rounding")))
        self._has_float32 = True
        self._free_float32()

    def grads(self) -> list[Tensor]:
        """The gradients in float32, where unscaling the loss cannot overflow or underflow them."""
        self._fill_float32()
        return self._inner.grads()

    def params_with_grad(self) -> dict[str, Tensor]:
        """The float32 parameters that have a gradient, by name."""
        self._fill_float32()
        return self._inner.params_with_grad()

    def offload(self) -> None:
        """Keep the inner optimizer's state in host memory."""
        self._inner.offload()

    def zero_grad(self) -> None:
        for parameter in self._half.values():
            parameter.grad = None
        self._free_float32()

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or none if not ok."""
        self._fill_float32()
        self._inner.step(lr, ok)
        if self._is_stochastic:
            step_key = splitmix64(self._step)
            for chunk in self._chunks:
                self._round(chunk, step_key)
            self._step += 1
        else:
            torch._foreach_copy_(list(self._half.values()), list(self._float32.values()))
        self._free_float32()

    def state_dict(self) -> dict[str, Tensor]:
        """The inner optimizer's state (float32), and the step counter that stochastic rounding depends on."""
        return {**self._inner.state_dict(), **({STEP: self._step} if self._is_stochastic else {})}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        if (STEP in state) != self._is_stochastic:
            raise CheckpointError(
                "the checkpoint was saved with another precision.rounding",
                why=f"only stochastic rounding saves {STEP}",
            )
        if self._is_stochastic:
            self._step.copy_(state[STEP])
        self._inner.load_state_dict({name: tensor for name, tensor in state.items() if name != STEP})

    @torch.no_grad()
    def _fill_float32(self) -> None:
        """Give the float32 parameters their values and gradients, if they have none."""
        if self._has_float32:
            return
        for name, half in self._half.items():
            self._float32[name].data = half.data.float()
            self._float32[name].grad = None if half.grad is None else half.grad.float()
        self._has_float32 = True

    def _free_float32(self) -> None:
        """Free the float32 parameters: the next update fills them again."""
        if not self._has_float32:
            return
        for parameter in self._float32.values():
            parameter.grad = None
            parameter.data = parameter.data.new_empty(0)
        self._has_float32 = False

    def _round(self, chunk: _Chunk, step_key: Tensor) -> None:
        def per_element(values: Tensor) -> Tensor:
            return values.repeat_interleave(chunk.sizes, output_size=chunk.num_elements)

        elements = torch.arange(chunk.num_elements, device=step_key.device) - per_element(chunk.starts)
        uniform = uniform_from_keys(per_element(splitmix64(step_key + chunk.keys)), elements)
        half = [self._half[name].data for name in chunk.names]
        values = torch.cat([self._float32[name].data.reshape(-1) for name in chunk.names])
        rounded = round_stochastic(values, uniform).split([p.numel() for p in half])
        torch._foreach_copy_(half, [part.view(p.shape) for part, p in zip(rounded, half, strict=True)])


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Parameters whose elements are rounded together."""

    names: list[str]
    keys: Tensor  # one per parameter
    sizes: Tensor
    starts: Tensor  # the first element of each parameter within the chunk
    num_elements: int


def _chunks(parameters: Mapping[str, Tensor], seed_key: int) -> Iterator[_Chunk]:
    """The parameters in order, in chunks of up to _CHUNK elements, at least one each."""
    names: list[str] = []
    for name, parameter in parameters.items():
        if names and sum(parameters[n].numel() for n in names) + parameter.numel() > _CHUNK:
            yield _chunk(names, parameters, seed_key)
            names = []
        names.append(name)
    if names:
        yield _chunk(names, parameters, seed_key)


def _chunk(names: list[str], parameters: Mapping[str, Tensor], seed_key: int) -> _Chunk:
    device = parameters[names[0]].device
    sizes = [parameters[name].numel() for name in names]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    param_keys = [to_int64(k) for k in keys.derive(seed_key, names)]
    return _Chunk(names, on_device(param_keys), on_device(sizes), on_device(starts), sum(sizes))
