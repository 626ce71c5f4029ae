"""The choice of norm: batch, group, layer or proxy-normalised group.

Owns the norms that do not look at the batch, and how a norm meets its activation, the sum of a residual block and a
pool; by kernels where those take all of it. Refuses to know networks.
Invariant: every norm has `weight` and `bias` under the same names, so a network's keys do not depend on the choice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.errors import UsageError
from reconv.kernels import dispatch as fused
from reconv.kernels.window import STEM_WINDOWS
from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.models.layers.conv import MaxPool2d, SameMaxPool2d

Activation = Literal["relu", "relu6", "silu"]
Function = Callable[[Tensor], Tensor]


# Functions, not partials: a copy of a network has the same ones, by which they are known.
def _relu(x: Tensor) -> Tensor:
    return F.relu(x, inplace=True)


def _relu6(x: Tensor) -> Tensor:
    return F.relu6(x, inplace=True)


def _silu(x: Tensor) -> Tensor:
    return F.silu(x, inplace=True)


ACTIVATIONS: dict[str, Function] = {"relu": _relu, "relu6": _relu6, "silu": _silu}

_NAMES: dict[Function, Activation] = {ACTIVATIONS[name]: name for name in get_args(Activation)}

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
        kind = "cpu" if activations.is_meta else activations.device.type  # autocast knows no tensors without memory
        with torch.autocast(kind, enabled=False):
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
    if isinstance(norm, BatchNorm2d) and function in _NAMES and norm.takes(x):
        return norm.activated(x, _NAMES[function])
    activations = function(norm(x))
    return norm.renormalise(activations, function) if isinstance(norm, ProxyNorm) else activations


def projected(layer: nn.Module, x: Tensor, conv: nn.Module) -> Tensor:
    """A 1x1 convolution of the output of a convolution, norm and activation."""
    if isinstance(layer, ConvNormAct) and isinstance(conv, nn.Conv2d):
        norm, function = layer[1], layer.function
        if isinstance(norm, BatchNorm2d) and norm.fused and norm.training and function in _NAMES:
            x = layer[0](x)
            if norm.takes(x) and norm.projects(x, conv):
                return norm.projected(x, conv, _NAMES[function])
            out: Tensor = conv(normed(norm, x, function))
            return out
    out = conv(layer(x))
    return out


class Fork(NamedTuple):
    """One value for two uses, each with a gradient of its own: the kernel that made it adds them as it reads them."""

    main: Tensor
    shortcut: Tensor


def fork(x: Tensor | Fork) -> Fork:
    """A block's input for its two paths."""
    return x if isinstance(x, Fork) else Fork(x, x)


def joined(
    norm: nn.Module, x: Tensor, shortcut: Tensor, projection: nn.Module | None, function: Function | None
) -> Tensor | Fork:
    """The norm of x plus the shortcut, which a projection may have to fit, and their activation unless it is None."""
    act: Activation | Literal["none"] | None = "none" if function is None else _NAMES.get(function)
    if isinstance(norm, BatchNorm2d) and (act == "none" or act == "relu") and norm.takes(x):
        other, other_norm = _unnormed(shortcut, projection, norm)
        if norm.takes(other) and (other.shape, other.dtype) == (x.shape, x.dtype):
            return Fork(*norm.joined(x, other, act, other_norm))
        shortcut, projection = other, other_norm
    total: Tensor = norm(x) + (shortcut if projection is None else projection(shortcut))
    return total if function is None else function(total)


def _unnormed(shortcut: Tensor, projection: nn.Module | None, norm: BatchNorm2d) -> tuple[Tensor, BatchNorm2d | None]:
    """What is added to a block's last norm, before its own norm, and that norm if it is to be fused."""
    if projection is None:
        return shortcut, None
    if isinstance(projection, nn.Sequential) and len(projection) == 2:
        conv, last = projection
        if (
            isinstance(last, BatchNorm2d)
            and last.fused
            and last.training
            and not last.fixed
            and last.groups == norm.groups
        ):
            return conv(shortcut), last
    return projection(shortcut), None


def pooled(norm: nn.Module, x: Tensor, function: Function, pool: nn.Module) -> Tensor | Fork:
    """The pool of the activation of the norm of x."""
    if (
        isinstance(norm, BatchNorm2d)
        and _NAMES.get(function) == "relu"
        and isinstance(pool, MaxPool2d | SameMaxPool2d)
        and pool.window in STEM_WINDOWS
        and norm.takes(x)
    ):
        return Fork(*norm.pooled(x, pool.window))
    out: Tensor = pool(normed(norm, x, function))
    return out


class ConvNormAct(nn.Sequential):
    """A convolution, its norm and, unless it is None, an activation; only the first two have names."""

    def __init__(self, conv: nn.Conv2d, norm: nn.Module, function: Function | None) -> None:
        super().__init__(conv, norm)
        self.function = function

    def forward(self, x: Tensor | Fork) -> Tensor:
        y = self[0](fork(x).main)
        if self.function is None:
            out: Tensor = self[1](y)
            return out
        return normed(self[1], y, self.function)


class SqueezeExcitation(nn.Module):
    """Channels weighed by a small network that sees their means (Hu et al., 2017)."""

    def __init__(self, channels: int, squeezed: int, function: Function) -> None:
        super().__init__()
        self.fc1 = nn.Conv2d(channels, squeezed, 1)
        self.fc2 = nn.Conv2d(squeezed, channels, 1)
        self.function = function
        self.fused = False  # whether kernels compute its passes over images in training, where they take them

    def forward(self, x: Tensor) -> Tensor:
        if self.takes(x):
            from reconv.kernels.squeeze_excite.ops import squeeze_excite

            return squeeze_excite(x, self.gate)
        return x * self.gate(x.mean((2, 3), keepdim=True))

    def takes(self, x: Tensor) -> bool:
        """Whether kernels compute the passes over these images."""
        return self.fused and self.training and fused.available(x)

    def gate(self, means: Tensor) -> Tensor:
        """What images of such means [n, channels, 1, 1] are multiplied with."""
        return torch.sigmoid(self.fc2(self.function(self.fc1(means))))


def excited(norm: nn.Module, x: Tensor, function: Function, se: SqueezeExcitation) -> Tensor:
    """Squeeze and excitation of the activation of the norm of x."""
    if isinstance(norm, BatchNorm2d) and function in _NAMES and se.takes(x) and norm.excites(x):
        return norm.excited(x, _NAMES[function], se.gate)
    out: Tensor = se(normed(norm, x, function))
    return out


def excited_join(norm: nn.Module, x: Tensor, se: SqueezeExcitation, shortcut: Tensor) -> Tensor | Fork:
    """The ReLU of the shortcut plus squeeze and excitation of the norm of x."""
    if (
        isinstance(norm, BatchNorm2d)
        and se.takes(x)
        and norm.excites(x, shortcut)
        and (shortcut.shape, shortcut.dtype) == (x.shape, x.dtype)
    ):
        return Fork(*norm.excited_join(x, shortcut, se.gate))
    return _relu(se(norm(x)) + shortcut)
