"""Dropout and drop-connect without history: every decision is a hash of (seed, layer, step, position, element).

Owns the hash in tensor operations and the layers that use it. Refuses to know batches and steps: the layer state
hands it one 64-bit row key per sample. Invariant: a sample's mask does not depend on which micro-batch or device
it is in. Without row keys (a network used outside the engine) the layers draw from torch's own generator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

_MASK = 0xFFFFFFFFFFFFFFFF


def signed(x: int) -> int:
    """A 64-bit pattern as the int64 that torch can hold."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = signed(0x9E3779B97F4A7C15)
_MULTIPLY_1 = signed(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = signed(0x94D049BB133111EB)


def _shift(x: Tensor, bits: int) -> Tensor:
    """A right shift that fills with zeros: torch's int64 shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def mix(x: Tensor) -> Tensor:
    """The splitmix64 finaliser on int64; products wrap around, as they do on every device."""
    x = (x ^ _shift(x, 30)) * _MULTIPLY_1
    x = (x ^ _shift(x, 27)) * _MULTIPLY_2
    return x ^ _shift(x, 31)


def row_keys(positions: Tensor, step: int | Tensor) -> Tensor:
    """One key per sample from its position and the step; a step on the device wraps around as the host's does."""
    turn = step * _GOLDEN + 1
    return mix(mix(positions + _GOLDEN) + (turn if isinstance(turn, Tensor) else signed(turn)))


def uniforms(rows: Tensor, layer_key: int, num_elements: int) -> Tensor:
    """Float32 numbers in [0, 1), one per sample and element: shape [n, num_elements]."""
    samples = mix(rows + signed(layer_key))
    return draw(samples[:, None], torch.arange(num_elements, device=rows.device)[None, :])


def draw(keys: Tensor, elements: Tensor) -> Tensor:
    """Float32 numbers in [0, 1), one for each key and number of an element."""
    return _shift(mix(keys + (elements + 1) * _GOLDEN), 40).to(torch.float32) * 2.0**-24


class Noise(nn.Module):
    """A layer that drops something at random in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        if not 0 <= rate < 1:
            raise ValueError(f"a drop rate is in [0, 1), not {rate}")
        self.rate = rate
        self.key = 0  # of (seed, layer name)
        self.rows: Tensor | None = None  # one key per sample of the micro-batch
        self.groups: tuple[int, ...] = ()

    def extra_repr(self) -> str:
        return f"rate={self.rate}"

    def _draw(self, x: Tensor, rows: Tensor | None, num_elements: int) -> Tensor:
        if rows is None:
            return torch.rand(x.shape[0], num_elements, device=x.device)
        return uniforms(rows, self.key, num_elements)


class Dropout(Noise):
    """Drops single elements and scales the rest, so that the expectation stays."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = self._draw(x, self.rows, x[0].numel()) >= self.rate
        return x * keep.view(x.shape).to(x.dtype) * (1 / (1 - self.rate))


class DropConnect(Noise):
    """Drops a residual branch, for each sample or for each whole group of samples, and scales what is kept."""

    def __init__(self, rate: float, per: Literal["sample", "batch"] = "sample") -> None:
        super().__init__(rate)
        self.per = per

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = self._keep(x).view(-1, *([1] * (x.dim() - 1)))
        return x * keep.to(x.dtype) * (1 / (1 - self.rate))

    def _keep(self, x: Tensor) -> Tensor:
        if self.per == "sample":
            return self._draw(x, self.rows, 1) >= self.rate
        groups = self.groups or (x.shape[0],)
        sizes = list(groups)
        starts = [sum(sizes[:g]) for g in range(len(sizes))]
        firsts = None if self.rows is None else torch.stack([self.rows[start] for start in starts])
        draws = self._draw(x[: len(sizes)], firsts, 1)
        return torch.cat([draw.expand(size, 1) for draw, size in zip(draws, sizes, strict=True)]) >= self.rate
