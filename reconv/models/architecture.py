"""Base classes of all architectures: a frozen spec of options, and a model made of named stages.

A spec is checked when it is created. Passing the input through `stages()` in order is the model's forward pass.

State-dict keys are torchvision's and do not depend on norm, padding or fusion (tests/models compares keys and numbers
of parameters with the published ones).
"""

from __future__ import annotations

import math
import types
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any, Literal, NamedTuple, Self, Union, get_args, get_origin, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.models.layers.conv import SameConv2d, SameMaxPool2d
from reconv.models.layers.norm import MAX_GROUPS, ProxyNorm, fit_groups

ConvInit = Literal["fan_out", "fan_in", "tf_fan_in", "tf_fan_out", "truncated", "dirac"]
LinearInit = Literal["torch", "glorot", "normal", "truncated", "uniform_out"]
Stem = Literal["imagenet", "cifar"]
# no-projection, of ResNets: bottlenecks without a projection, never basic blocks (Graphcore's rule); of inverted
# residuals: blocks that have a shortcut.
ZeroGamma = Literal["never", "always", "no-projection"]


@dataclass(frozen=True, slots=True)
class InitScheme:
    """Initialization of a model's parameters, apart from the seed."""

    conv: str = "fan_out"
    linear: str = "torch"
    zero_init_norms: frozenset[str] = frozenset()  # names of the norms whose weight is initialized to zero
    glorot_convs: frozenset[str] = frozenset()  # names of convolutions with Keras' default (Glorot) instead


class AuxOutput(NamedTuple):
    """The training output of a model with auxiliary heads; in evaluation it returns the logits alone."""

    logits: Tensor
    auxiliary: tuple[Tensor, ...]
    weight: float  # of each auxiliary loss; the main loss has weight 1


class SSDOutput(NamedTuple):
    """A detector's predictions for each of its default boxes."""

    box_deltas: Tensor  # [n, boxes, 4]: offsets from the default box, as `encode_boxes` makes them
    logits: Tensor  # [n, boxes, classes]; class 0 is the background


def flatten_predictions(x: Tensor, numbers: int) -> Tensor:
    """[n, shapes * numbers, rows, columns] as [n, shapes * rows * columns, numbers]."""
    n, channels, rows, columns = x.shape
    shapes = x.view(n, channels // numbers, numbers, rows, columns)
    return shapes.permute(0, 1, 3, 4, 2).reshape(n, -1, numbers)


class ReconvModel(nn.Module):
    """A model as an ordered list of named stages."""

    init_scheme: InitScheme = InitScheme()
    head_patterns: tuple[str, ...] = ()  # parameters of the head, absent from backbone weights; empty: the last layer

    def stages(self) -> list[tuple[str, nn.Module]]:
        """Named parts in order; each takes the output of the one before."""
        raise NotImplementedError

    def forward(self, images: Tensor) -> Tensor | AuxOutput | SSDOutput:
        raise NotImplementedError

    def global_avg_pool(self, x: Tensor) -> Tensor:
        """The mean of each channel [n, channels] of images [n, channels, height, width]."""
        return F.adaptive_avg_pool2d(x, 1).flatten(1)


class Stage(nn.Module):
    """A stage that calls a method of the model, and lists the modules with the parameters it uses."""

    def __init__(self, function: Callable[[Any], Any], *modules: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(modules)
        self._function = function

    def forward(self, value: Any) -> Any:
        return self._function(value)


@dataclass(frozen=True, kw_only=True)
class Spec:
    """The options that every architecture has."""

    num_classes: int = 1000
    """Number of outputs, taken from the data; 1001 if label 0 is the background."""
    in_channels: int = 3
    """Channels of an image."""
    norm: Literal["batch", "group", "layer", "proxy"] = "batch"
    """Norm of every layer; proxy is a group norm with proxy normalization."""
    norm_groups: int | None = None
    """Groups of group and proxy norms, at most one per channel; null is the largest number up to 32 that fits."""
    norm_eps: float = 1e-5
    """Epsilon of the norms."""
    proxy_eps: float = 0.03
    """Epsilon of the proxy normalization."""
    bn_momentum: float = 0.1
    """Weight of the new value in running statistics; TensorFlow's decay is 1 minus this."""
    padding: Literal["torch", "same"] = "torch"
    """Padding of convolutions and pools; same is TensorFlow's, which pads more at the end."""
    conv_init: ConvInit = "fan_out"
    """Initialization of convolutions; tf_ is TensorFlow's variance scaling."""
    linear_init: LinearInit = "torch"
    """Initialization of linear layers."""

    def __post_init__(self) -> None:
        hints = _option_types(type(self))
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, list):
                value = tuple(value)
                object.__setattr__(self, field.name, value)
            _check_option(field.name, value, hints[field.name])
            _check_range(field.name, value)

    def make_conv(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> nn.Conv2d:
        """A convolution without bias, padded so that stride 1 keeps the image size (odd kernels)."""
        if self.padding == "same" and stride > 1 and kernel > 1:
            return SameConv2d(in_channels, out_channels, kernel, stride, groups=groups, bias=False)
        return nn.Conv2d(in_channels, out_channels, kernel, stride, kernel // 2, groups=groups, bias=False)

    def make_norm(self, channels: int) -> nn.Module:
        """The chosen norm, where no activation follows: with `proxy` a plain group norm."""
        if self.norm == "batch":
            return BatchNorm2d(channels, self.norm_eps, self.bn_momentum)
        num_groups = 1 if self.norm == "layer" else self._num_groups(channels)
        return nn.GroupNorm(num_groups, channels, self.norm_eps)

    def make_norm_act(self, channels: int, act: nn.Module) -> tuple[nn.Module, nn.Module]:
        """The chosen norm and the activation that follows it; a proxy norm contains its activation."""
        if self.norm != "proxy":
            return self.make_norm(channels), act
        norm = ProxyNorm(self._num_groups(channels), channels, self.norm_eps, self.proxy_eps, act)
        return norm, nn.Identity()

    def _num_groups(self, channels: int) -> int:
        return min(self.norm_groups or MAX_GROUPS, channels)

    def with_groups(self) -> Self:
        """The spec with `norm_groups` checked, or set to the largest number up to 32 that divides every layer."""
        if self.norm not in ("group", "proxy"):
            return self
        return replace(self, norm_groups=fit_groups(self.norm_groups, _norm_channels(replace(self, norm="layer"))))

    def make_max_pool(self, kernel: int, stride: int, padding: int = 0, ceil: bool = False) -> nn.Module:
        """A max-pool; `padding` and `ceil` apply to torch's padding, SAME has its own rule."""
        if self.padding == "same":
            return SameMaxPool2d(kernel, stride)
        return nn.MaxPool2d(kernel, stride, padding, ceil_mode=ceil)

    def build(self) -> ReconvModel:
        """The model of this spec, with torch's default initialization."""
        raise NotImplementedError


_types_of_specs: dict[type[Spec], Mapping[str, Any]] = {}


def _option_types(spec: type[Spec]) -> Mapping[str, Any]:
    """The types of a spec's options by name; finding them takes half a millisecond."""
    if spec not in _types_of_specs:
        _types_of_specs[spec] = get_type_hints(spec)
    return _types_of_specs[spec]


@lru_cache(64)
def _norm_channels(spec: Spec) -> frozenset[int]:
    """The numbers of channels of the norms of a model whose norms are group norms; building one takes 50 ms."""
    with torch.device("meta"):
        model = spec.build()
    return frozenset(module.num_channels for module in model.modules() if isinstance(module, nn.GroupNorm))


_POSITIVE = (lambda number: number > 0, "above 0")
_WHOLE = (lambda number: number >= 1, "at least 1")
_NOT_NEGATIVE = (lambda number: number >= 0, "at least 0")
_FRACTION = (lambda number: 0 <= number <= 1, "between 0 and 1")
_RATE = (lambda number: 0 <= number < 1, "at least 0 and below 1")
# The range of each option by name, in every architecture that has it; of a list, of each item.
_RANGES: Mapping[str, tuple[Callable[[float], bool], str]] = {
    **dict.fromkeys(("norm_eps", "proxy_eps", "width_coefficient", "depth_coefficient", "head_scale"), _POSITIVE),
    **dict.fromkeys(("num_classes", "in_channels", "norm_groups", "widths", "depths"), _WHOLE),
    **dict.fromkeys(("width", "groups", "width_per_group", "depth_divisor", "expand_ratio", "group_dim"), _WHOLE),
    **dict.fromkeys(("extra_widths", "boxes_per_cell"), _WHOLE),
    **dict.fromkeys(("se_units", "se_ratio", "top_width", "num_halved"), _NOT_NEGATIVE),
    **dict.fromkeys(("dropout", "aux_dropout", "drop_connect", "drop_path_rate"), _RATE),
    "bn_momentum": _FRACTION,
}


def _check_range(name: str, value: object) -> None:
    """Raise UsageError if a number is out of its option's range."""
    is_valid, text = _RANGES.get(name, (lambda number: True, ""))
    for number in value if isinstance(value, tuple) else (value,):
        is_number = isinstance(number, (int, float)) and not isinstance(number, bool)
        if is_number and not (math.isfinite(number) and is_valid(number)):
            raise UsageError(f"model option {name} cannot be {number}", why=f"it must be {text or 'a finite number'}")


def _check_option(name: str, value: object, hint: Any) -> None:
    """Raise UsageError if a value does not have the option's type."""
    if not _fits(value, hint):
        raise UsageError(f"model option {name} cannot be {value!r}", why=f"it must be {_describe(hint)}")


def _fits(value: object, hint: Any) -> bool:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, choice) for choice in get_args(hint))
    if origin is Literal:
        return value in get_args(hint) and type(value) in {type(choice) for choice in get_args(hint)}
    if origin is tuple:
        item = get_args(hint)[0]
        return isinstance(value, tuple) and all(_fits(v, item) for v in value)
    if hint is float:
        return isinstance(value, (int, float)) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, hint)


def _describe(hint: Any) -> str:
    origin = get_origin(hint)
    if origin in (Union, types.UnionType):
        return " or ".join(_describe(choice) for choice in get_args(hint))
    if origin is Literal:
        return ", ".join(str(choice) for choice in get_args(hint))
    if origin is tuple:
        return f"a list, each item {_describe(get_args(hint)[0])}"
    return {bool: "true or false", int: "a whole number", float: "a number", str: "a string", type(None): "null"}[hint]


def zero_gamma_norms(rule: ZeroGamma, last_norms: Iterable[tuple[str, bool]]) -> frozenset[str]:
    """The norms whose weight is initialized to zero, from each block's last norm and whether it has a shortcut."""
    return frozenset(
        norm for norm, has_shortcut in last_norms if rule == "always" or (rule == "no-projection" and has_shortcut)
    )
