"""Counter-based dropout and drop-connect: every mask is a hash of (seed, layer, step, position, element).

So a sample's mask does not depend on the micro-batch or device it is in, and no generator state is saved. `LayerState`
sets one 64-bit key per sample; without keys (a model used outside the trainer) the layers use torch's generator.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

_MASK = 0xFFFFFFFFFFFFFFFF


def to_int64(x: int) -> int:
    """A 64-bit pattern as the int64 that torch can hold."""
    x &= _MASK
    return x - (1 << 64) if x >> 63 else x


_GOLDEN = to_int64(0x9E3779B97F4A7C15)
_MULTIPLY_1 = to_int64(0xBF58476D1CE4E5B9)
_MULTIPLY_2 = to_int64(0x94D049BB133111EB)


def _logical_shift_right(x: Tensor, bits: int) -> Tensor:
    """A right shift that fills with zeros; torch's int64 shift fills with the sign."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def splitmix64(x: Tensor) -> Tensor:
    """The splitmix64 finalizer on int64; products wrap around, as they do on every device."""
    x = (x ^ _logical_shift_right(x, 30)) * _MULTIPLY_1
    x = (x ^ _logical_shift_right(x, 27)) * _MULTIPLY_2
    return x ^ _logical_shift_right(x, 31)


def sample_keys(positions: Tensor, step: int | Tensor) -> Tensor:
    """One key per sample from its position and the step; a step on the device wraps around as on the host."""
    turn = step * _GOLDEN + 1
    return splitmix64(splitmix64(positions + _GOLDEN) + (turn if isinstance(turn, Tensor) else to_int64(turn)))


def uniform_per_sample(keys: Tensor, layer_key: int, num_elements: int) -> Tensor:
    """Float32 numbers in [0, 1), one per sample and element: shape [n, num_elements]."""
    samples = splitmix64(keys + to_int64(layer_key))
    return uniform_from_keys(samples[:, None], torch.arange(num_elements, device=keys.device)[None, :])


def uniform_from_keys(keys: Tensor, elements: Tensor) -> Tensor:
    """Float32 numbers in [0, 1), one for each pair of key and element number."""
    return _logical_shift_right(splitmix64(keys + (elements + 1) * _GOLDEN), 40).to(torch.float32) * 2.0**-24


class KeyedRandomLayer(nn.Module):
    """A layer that drops something at random in training."""

    def __init__(self, rate: float) -> None:
        super().__init__()
        self.init_keys(rate)

    def init_keys(self, rate: float) -> None:
        """Set the drop rate, and the keys of its random numbers to none."""
        if not 0 <= rate < 1:
            raise ValueError(f"a drop rate is in [0, 1), not {rate}")
        self.rate = rate
        self.key = 0  # of (seed, layer name)
        self.sample_keys: Tensor | None = None  # one key per sample of the micro-batch
        self.shared_key: Tensor | None = None  # one key [1] of the step, for rows that belong to no sample
        self.groups: tuple[int, ...] = ()

    def extra_repr(self) -> str:
        return f"rate={self.rate}"

    def _uniform(self, x: Tensor, keys: Tensor | None, num_elements: int) -> Tensor:
        """Numbers for `num_elements` elements of each row of x; a sample may have several rows, such as windows."""
        if keys is None:
            return torch.rand(x.shape[0], num_elements, device=x.device)
        num_rows, remainder = divmod(x.shape[0], keys.shape[0])
        if remainder and self.shared_key is not None:  # such as a table of relative positions
            return uniform_per_sample(self.shared_key, self.key, x.shape[0] * num_elements).view(x.shape[0], -1)
        return uniform_per_sample(keys, self.key, num_rows * num_elements).view(x.shape[0], num_elements)


class Dropout(KeyedRandomLayer):
    """Drops single elements and scales the rest, so that the expectation stays."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = self._uniform(x, self.sample_keys, x[0].numel()) >= self.rate
        return x * keep.view(x.shape).to(x.dtype) * (1 / (1 - self.rate))


class ChannelDropout(KeyedRandomLayer):
    """Drops whole channels of x [n, channels, ...] and scales the rest: torch's Dropout1d, Dropout2d and Dropout3d."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.rate == 0:
            return x
        keep = self._uniform(x, self.sample_keys, x.shape[1]) >= self.rate
        return x * keep.view(*keep.shape, *([1] * (x.dim() - 2))).to(x.dtype) * (1 / (1 - self.rate))


class DropConnect(KeyedRandomLayer):
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
            return self._uniform(x, self.sample_keys, 1) >= self.rate
        sizes = list(self.groups or (x.shape[0],))
        num_rows = x.shape[0] // sum(sizes)  # of a sample
        starts = [sum(sizes[:g]) for g in range(len(sizes))]
        keys = None if self.sample_keys is None else torch.stack([self.sample_keys[start] for start in starts])
        values = self._uniform(x[: len(sizes)], keys, 1)
        return (
            torch.cat([value.expand(size * num_rows, 1) for value, size in zip(values, sizes, strict=True)])
            >= self.rate
        )
