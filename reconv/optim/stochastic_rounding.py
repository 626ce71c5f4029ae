"""Half-precision weights without a copy in full precision: the update is computed wide, and rounded when stored.

Owns the rounding and the short life of the wide tensors. Refuses to know update rules: any optimizer over wide tensors
will do. Invariant: a draw is a hash of (seed, step, parameter, element); a step that is not ok changes no bit, since
what is stored already needs no rounding. The state of the wrapped optimizer is float32.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from reconv import random as keys
from reconv.errors import CheckpointError
from reconv.models.layers.dropout import draw, mix, signed
from reconv.optim.param_groups import DecayGroups

STEP = "rounding.step"
_CHUNK = 2**22  # elements rounded at a time: few kernels, and temporaries of tens of megabytes


class RoundableOptimizer(Protocol):
    """The optimizer that works on the wide tensors."""

    def step(self, lr: float | Tensor, ok: Tensor) -> None: ...
    def zero_grad(self) -> None: ...
    def grads(self) -> list[Tensor]: ...
    def state(self) -> dict[str, Tensor]: ...
    def restore(self, state: Mapping[str, Tensor]) -> None: ...
    def offload(self) -> None: ...


def round_stochastic(values: Tensor, draws: Tensor) -> Tensor:
    """Float32 values as float16: up or down with the probability that keeps the mean, given draws in [0, 1).

    A value that float16 holds stays as it is; infinities and NaNs too.
    """
    exponents = ((values.contiguous().view(torch.int32) >> 23) & 0xFF) - 127
    # The distance of two neighbours in float16: ten bits below the leading one, and 2^-24 below 2^-14.
    spacing = ((exponents.clamp(min=-14) - 10 + 127) << 23).view(torch.float32)
    counted = values / spacing  # exact: a division by a power of two
    below = counted.floor()
    return ((below + (draws < counted - below)) * spacing).to(torch.float16)


@dataclass(frozen=True, slots=True)
class Rounding:
    """How an updated weight becomes a half: to the nearest, or at random without bias."""

    is_stochastic: bool
    seed: int = 0


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Some parameters whose elements are rounded in one go."""

    names: list[str]
    keys: Tensor  # one per parameter
    sizes: Tensor
    starts: Tensor  # of each parameter among the chunk's elements
    num_elements: int


def widened(groups: DecayGroups) -> DecayGroups:
    """The same names and shapes in float32; the values come before each update."""

    def wide(parameters: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        return {
            name: nn.Parameter(torch.empty_like(p, dtype=torch.float32), requires_grad=False)
            for name, p in parameters.items()
        }

    return DecayGroups(wide(groups.decayed), wide(groups.free))


class HalfWeights:
    """An optimizer of half-precision parameters: widen, let the inner one step, round."""

    def __init__(self, narrow: DecayGroups, wide: DecayGroups, inner: RoundableOptimizer, rounding: Rounding) -> None:
        self._narrow = {**narrow.decayed, **narrow.free}
        self._wide = {**wide.decayed, **wide.free}
        self._inner = inner
        self._is_stochastic = rounding.is_stochastic
        device = next(iter(self._narrow.values())).device
        self._step = torch.zeros((), dtype=torch.int64, device=device)  # on the device: the host need not know it
        self._chunks = list(_chunks(self._narrow, keys.key(rounding.seed, "rounding")))
        self._is_wide = True
        self._release()

    def grads(self) -> list[Tensor]:
        """Every gradient in float32, where the inverse of a loss scale does not push it out of the type."""
        self._widen()
        return self._inner.grads()

    def offload(self) -> None:
        """Keep the inner optimizer's state in the host's memory."""
        self._inner.offload()

    def zero_grad(self) -> None:
        """Forget all gradients."""
        for parameter in self._narrow.values():
            parameter.grad = None
        self._release()

    @torch.no_grad()
    def step(self, lr: float | Tensor, ok: Tensor) -> None:
        """Update every parameter that has a gradient, or nothing at all when not ok."""
        self._widen()
        self._inner.step(lr, ok)
        if self._is_stochastic:
            rows = mix(self._step)
            for chunk in self._chunks:
                self._round(chunk, rows)
            self._step += 1
        else:
            torch._foreach_copy_(list(self._narrow.values()), list(self._wide.values()))
        self._release()

    def state(self) -> dict[str, Tensor]:
        """The inner optimizer's state, and the counter of steps where draws depend on it."""
        return {**self._inner.state(), **({STEP: self._step} if self._is_stochastic else {})}

    def restore(self, state: Mapping[str, Tensor]) -> None:
        """Take over what a checkpoint held."""
        if (STEP in state) != self._is_stochastic:
            raise CheckpointError(
                "the saved optimizer state is of another rounding",
                why=f"{STEP} is saved with stochastic rounding, and only then",
            )
        if self._is_stochastic:
            self._step.copy_(state[STEP])
        self._inner.restore({name: tensor for name, tensor in state.items() if name != STEP})

    @torch.no_grad()
    def _widen(self) -> None:
        """Give the wide tensors their values and gradients, if they have none."""
        if self._is_wide:
            return
        for name, narrow in self._narrow.items():
            self._wide[name].data = narrow.data.float()
            self._wide[name].grad = None if narrow.grad is None else narrow.grad.float()
        self._is_wide = True

    def _release(self) -> None:
        """Free the wide tensors: nothing of them is needed before the next update."""
        if not self._is_wide:
            return
        for wide in self._wide.values():
            wide.grad = None
            wide.data = wide.data.new_empty(0)
        self._is_wide = False

    def _round(self, chunk: _Chunk, rows: Tensor) -> None:
        def repeated(values: Tensor) -> Tensor:
            return values.repeat_interleave(chunk.sizes, output_size=chunk.num_elements)

        elements = torch.arange(chunk.num_elements, device=rows.device) - repeated(chunk.starts)
        draws = draw(repeated(mix(rows + chunk.keys)), elements)
        narrow = [self._narrow[name].data for name in chunk.names]
        values = torch.cat([self._wide[name].data.reshape(-1) for name in chunk.names])
        rounded = round_stochastic(values, draws).split([p.numel() for p in narrow])
        torch._foreach_copy_(narrow, [part.view(p.shape) for part, p in zip(rounded, narrow, strict=True)])


def _chunks(parameters: Mapping[str, Tensor], base: int) -> Iterator[_Chunk]:
    """The parameters in order, as many at a time as fit, at least one."""
    names: list[str] = []
    for name, parameter in parameters.items():
        if names and sum(parameters[n].numel() for n in names) + parameter.numel() > _CHUNK:
            yield _chunk(names, parameters, base)
            names = []
        names.append(name)
    if names:
        yield _chunk(names, parameters, base)


def _chunk(names: list[str], parameters: Mapping[str, Tensor], base: int) -> _Chunk:
    device = parameters[names[0]].device
    sizes = [parameters[name].numel() for name in names]
    starts = [sum(sizes[:i]) for i in range(len(sizes))]

    def on_device(values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=device)

    own = [signed(k) for k in keys.derive(base, names)]
    return _Chunk(names, on_device(own), on_device(sizes), on_device(starts), sum(sizes))
