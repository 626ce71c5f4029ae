"""Initial values: every parameter is a function of the seed and of its own name.

Owns the distributions. Refuses to know architectures: a network says which rule it wants. Invariant: values do not
depend on the order of construction, the device or the dtype; they are drawn on the host in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reconv import random as keys
from reconv.models.architecture import Initialisation, ReconvModel
from reconv.models.external import redraw

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
# The standard deviation of a normal cut at two deviations, by which TensorFlow divides so that the drawn values
# have the variance that was asked for.
_TRUNCATED_STD = 0.87962566103423978
_DRAWS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)  # of convolutions and linear layers
_SMALL_STD = 0.01  # of the rules `normal` and `truncated`: MobileNetV2's head, all of GoogLeNet


class Undrawn(TorchFunctionMode):
    """Layers built inside leave out their own draws, which `initialise` would replace: a third of a network's start."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func in _DRAWS else func(*args, **kwargs)


def initialise(model: nn.Module, seed: int) -> None:
    """Give every parameter its initial value, running statistics included; other packages' networks draw their own."""
    if redraw(model, seed):
        return
    rule = model.initialisation if isinstance(model, ReconvModel) else Initialisation()
    draws: dict[Tensor, Future[Tensor]] = {}
    # Each draw has a generator of its own, and lets go of Python's lock.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, torch.no_grad():
        for name, module in model.named_modules():
            for own_name, parameter in module.named_parameters(recurse=False):
                full_name = f"{name}.{own_name}" if name else own_name
                if parameter not in draws:
                    key = keys.key(seed, "init:" + full_name)
                    draws[parameter] = pool.submit(_draw, module, name, own_name, parameter, rule, key)
        for parameter, drawn in draws.items():
            parameter.copy_(drawn.result())
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()


def _draw(module: nn.Module, name: str, own_name: str, parameter: Tensor, rule: Initialisation, key: int) -> Tensor:
    generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    values = torch.empty(parameter.shape, dtype=torch.float32)
    if isinstance(module, NORMS):
        starts_at_one = own_name == "weight" and name not in rule.zero_norms
        return values.fill_(1.0 if starts_at_one else 0.0)
    if isinstance(module, nn.Conv2d):
        return _conv(values, module, own_name, "glorot" if name in rule.glorot_convs else rule.conv, generator)
    if isinstance(module, nn.Linear):
        return _linear(values, module, own_name, rule, generator)
    # A parameter of another kind of layer: its constructor knows best.
    return parameter.detach()


def _conv(values: Tensor, module: nn.Conv2d, own_name: str, rule: str, generator: torch.Generator) -> Tensor:
    if own_name == "bias":
        return values.zero_()
    area = module.kernel_size[0] * module.kernel_size[1]
    fan_in, fan_out = values.shape[1] * area, values.shape[0] * area
    if rule == "fan_out":
        return values.normal_(0.0, math.sqrt(2.0 / fan_out), generator=generator)
    if rule == "fan_in":
        return values.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
    if rule == "tf_fan_in":  # variance scaling, scale 1, truncated
        return _truncated(values, math.sqrt(1.0 / fan_in) / _TRUNCATED_STD, generator)
    if rule == "tf_fan_out":  # variance scaling, scale 2, truncated; grouped kernels go by what they read
        fan = fan_out if module.groups == 1 else fan_in
        return _truncated(values, math.sqrt(2.0 / fan) / _TRUNCATED_STD, generator)
    if rule == "truncated":
        return _truncated(values, _SMALL_STD, generator)
    if rule == "dirac":  # what comes in goes on unchanged; the channels beyond that are torch's own
        bound = 1.0 / math.sqrt(fan_in)
        values.uniform_(-bound, bound, generator=generator)
        torch.nn.init.dirac_(values[: values.shape[1]])
        return values
    if rule == "glorot":
        bound = math.sqrt(6.0 / (fan_in + fan_out))
        return values.uniform_(-bound, bound, generator=generator)
    raise ValueError(f"unknown convolution rule {rule}")


def _linear(
    values: Tensor, module: nn.Linear, own_name: str, rule: Initialisation, generator: torch.Generator
) -> Tensor:
    if rule.linear == "torch":  # uniform within 1/sqrt(fan_in), bias too
        bound = 1.0 / math.sqrt(module.in_features)
        return values.uniform_(-bound, bound, generator=generator)
    if own_name == "bias":
        return values.zero_()
    if rule.linear == "uniform_out":
        bound = 1.0 / math.sqrt(module.out_features)
        return values.uniform_(-bound, bound, generator=generator)
    if rule.linear == "glorot":
        bound = math.sqrt(6.0 / (module.in_features + module.out_features))
        return values.uniform_(-bound, bound, generator=generator)
    if rule.linear == "normal":
        return values.normal_(0.0, _SMALL_STD, generator=generator)
    if rule.linear == "truncated":
        return _truncated(values, _SMALL_STD, generator)
    raise ValueError(f"unknown linear rule {rule.linear}")


def _truncated(values: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """A normal cut at two deviations."""
    return torch.nn.init.trunc_normal_(values, 0.0, std, -2 * std, 2 * std, generator=generator)
