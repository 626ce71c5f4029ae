"""The choice of norm: batch, group, layer or proxy-normalised group.

Owns the norms that do not look at the batch, and how a norm meets its activation. Refuses to know networks.
Invariant: every norm has `weight` and `bias` under the same names, so a network's keys do not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.errors import UsageError

Activation = Literal["relu", "relu6", "silu"]
Function = Callable[[Tensor], Tensor]

ACTIVATIONS: dict[str, Function] = {
    "relu": partial(F.relu, inplace=True),
    "relu6": partial(F.relu6, inplace=True),
    "silu": partial(F.silu, inplace=True),
}

MOST_GROUPS = 32  # of a norm whose groups are not given
_NUM_QUANTILES = 200


class ProxyNorm(nn.GroupNorm):
    """Group norm whose activations are normalised once more, by what a Gaussian proxy of them would have.

    Labatie et al., 2021: with y the group-normalised input and a = act(w * y + b), the output is
    (a - mean) / sqrt(var + eps) over proxies y' = (1 + proxy_scale) * gauss + proxy_shift in place of y. It undoes
    what makes channels constant when the batch is not looked at. Before a sum, where no activation follows, networks
    have plain group norm instead.
    """

    quantiles: Tensor

    def __init__(self, num_groups: int, num_channels: int, eps: float, proxy_eps: float) -> None:
        super().__init__(num_groups, num_channels, eps)
        self.proxy_eps = proxy_eps
        self.proxy_shift = nn.Parameter(torch.zeros(num_channels))
        self.proxy_scale = nn.Parameter(torch.zeros(num_channels))
        middles = (torch.arange(_NUM_QUANTILES, dtype=torch.float64) + 0.5) / _NUM_QUANTILES
        self.register_buffer("quantiles", torch.special.ndtri(middles).float()[:, None], persistent=False)

    def renormalise(self, activations: Tensor, function: Function) -> Tensor:
        """Normalise activations by the moments of the proxy's."""
        with torch.autocast(activations.device.type, enabled=False):
            proxy = (1 + self.proxy_scale) * self.quantiles.to(self.weight.dtype) + self.proxy_shift
            proxy = function(self.weight * proxy + self.bias)
            mean = proxy.mean(0)
            inverse_std = (proxy.var(0, unbiased=False) + self.proxy_eps).rsqrt()
        dtype = activations.dtype
        return (activations - mean.to(dtype).view(1, -1, 1, 1)) * inverse_std.to(dtype).view(1, -1, 1, 1)


def fit_groups(num_groups: int | None, channels: Collection[int]) -> int:
    """A number of groups that divides every layer, small ones having one per channel; None: the largest up to 32."""

    def fits(number: int) -> bool:
        return all(layer % min(number, layer) == 0 for layer in channels)

    if num_groups is None:
        return next(number for number in range(MOST_GROUPS, 0, -1) if fits(number))
    if not fits(num_groups):
        common = math.gcd(*channels)
        layer = min(layer for layer in channels if layer % min(num_groups, layer))
        divisors = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
        raise UsageError(
            f"norm_groups: {num_groups} does not divide a layer of {layer} channels",
            then=f"one that divides every layer of this network: {divisors}",
        )
    return num_groups


def normed(norm: nn.Module, x: Tensor, function: Function) -> Tensor:
    """The activation of the norm of x."""
    activations = function(norm(x))
    return norm.renormalise(activations, function) if isinstance(norm, ProxyNorm) else activations


class ConvNormAct(nn.Sequential):
    """A convolution, its norm and, unless it is None, an activation; only the first two have names."""

    def __init__(self, conv: nn.Conv2d, norm: nn.Module, function: Function | None) -> None:
        super().__init__(conv, norm)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        x = self[0](x)
        if self.function is None:
            out: Tensor = self[1](x)
            return out
        return normed(self[1], x, self.function)


class SqueezeExcitation(nn.Module):
    """Channels weighed by a small network that sees their means (Hu et al., 2017)."""

    def __init__(self, channels: int, squeezed: int, function: Function) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        weights = self.fc2(self.function(self.fc1(x.mean((2, 3), keepdim=True))))
        return x * torch.sigmoid(weights)
