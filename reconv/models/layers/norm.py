"""Norms that do not look at the batch: proxy-normalized group norm, and the number of groups that fits a model.

Every norm has `weight` and `bias` under the same names, so a model's keys do not depend on the choice of norm.
"""

from __future__ import annotations

import math
from collections.abc import Collection

import torch
from torch import Tensor, nn

from reconv.core.errors import UsageError

MAX_GROUPS = 32  # of a norm whose number of groups is not given
_NUM_QUANTILES = 200


class ProxyNorm(nn.GroupNorm):
    """Group norm and an activation, normalized once more by the moments of a Gaussian proxy's activations.

    Labatie et al., 2021: with y the group-normalized input and a = act(w * y + b), the output is
    (a - mean) / sqrt(var + eps), with the moments of a computed over proxies y' = (1 + proxy_scale) * gauss +
    proxy_shift in place of y. It prevents channels from becoming constant where the norm does not see the batch.
    Before a residual sum, where no activation follows, models use plain group norm instead.
    """

    quantiles: Tensor

    def __init__(self, num_groups: int, num_channels: int, eps: float, proxy_eps: float, act: nn.Module) -> None:
        super().__init__(num_groups, num_channels, eps)
        self.act = act
        self.proxy_eps = proxy_eps
        self.proxy_shift = nn.Parameter(torch.zeros(num_channels))
        self.proxy_scale = nn.Parameter(torch.zeros(num_channels))
        middles = (torch.arange(_NUM_QUANTILES, dtype=torch.float64) + 0.5) / _NUM_QUANTILES
        self.register_buffer("quantiles", torch.special.ndtri(middles).float()[:, None], persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.renormalize(self.act(super().forward(x)))

    def renormalize(self, activations: Tensor) -> Tensor:
        """Normalize activations [n, channels, height, width] by the moments of the proxy's."""
        kind = "cpu" if activations.is_meta else activations.device.type  # autocast does not know the meta device
        with torch.autocast(kind, enabled=False):
            proxy = (1 + self.proxy_scale) * self.quantiles.to(self.weight.dtype) + self.proxy_shift
            proxy = self.act(self.weight * proxy + self.bias)
            mean = proxy.mean(0)
            inverse_std = (proxy.var(0, unbiased=False) + self.proxy_eps).rsqrt()
        dtype = activations.dtype
        out: Tensor = (activations - mean.to(dtype).view(1, -1, 1, 1)) * inverse_std.to(dtype).view(1, -1, 1, 1)
        return out


def fit_groups(num_groups: int | None, channels: Collection[int]) -> int:
    """A number of groups that divides every layer, at most one per channel; None: the largest up to 32."""

    def fits(number: int) -> bool:
        return all(layer % min(number, layer) == 0 for layer in channels)

    if num_groups is None:
        return next(number for number in range(MAX_GROUPS, 0, -1) if fits(number))
    if not fits(num_groups):
        common = math.gcd(*channels)
        layer = min(layer for layer in channels if layer % min(num_groups, layer))
        divisors = ", ".join(str(d) for d in range(1, common + 1) if common % d == 0)
        raise UsageError(
            f"norm_groups: {num_groups} does not divide a layer of {layer} channels",
            hint=f"choose one that divides every layer of this model: {divisors}",
        )
    return num_groups
