"""Weight initialization: every parameter is a function of the seed and its own name.

Values do not depend on the order of construction, the device or the dtype: they are drawn on the host in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from reconv.core import random as keys
from reconv.models.architecture import InitScheme, ReconvModel
from reconv.models.external import reinit_external

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
# The standard deviation of a normal truncated at two deviations. TensorFlow divides by it to get the given variance.
_TRUNCATED_STD = 0.87962566103423978
_SKIPPED_INITS = (nn.init.kaiming_uniform_, nn.init.uniform_, nn.init.normal_)  # of convolutions and linear layers
_SMALL_STD = 0.01  # of `normal` and `truncated`: MobileNetV2's head, all of GoogLeNet


class SkipInit(TorchFunctionMode):
    """Layers built inside skip torch's default initialization, a third of the build time: `init_weights` follows."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        return kwargs["tensor"] if func in _SKIPPED_INITS else func(*args, **kwargs)


def init_weights(model: nn.Module, seed: int) -> None:
    """Initialize every parameter and reset running statistics; external models use their own package's scheme."""
    if reinit_external(model, seed):
        return
    scheme = model.init_scheme if isinstance(model, ReconvModel) else InitScheme()
    values: dict[Tensor, Future[Tensor]] = {}
    # Each parameter has its own generator, and sampling releases the GIL.
    with ThreadPoolExecutor(torch.get_num_threads()) as pool, torch.no_grad():
        for name, module in model.named_modules():
            for own_name, parameter in module.named_parameters(recurse=False):
                full_name = f"{name}.{own_name}" if name else own_name
                if parameter not in values:
                    key = keys.key(seed, "init:" + full_name)
                    values[parameter] = pool.submit(_init_parameter, module, name, own_name, parameter, scheme, key)
        for parameter, value in values.items():
            parameter.copy_(value.result())
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase):
            module.reset_running_stats()


def _init_parameter(
    module: nn.Module, name: str, own_name: str, parameter: Tensor, rule: InitScheme, key: int
) -> Tensor:
    generator = torch.Generator().manual_seed(key & 0x7FFFFFFFFFFFFFFF)
    values = torch.empty(parameter.shape, dtype=torch.float32)
    if isinstance(module, NORMS):
        is_one = own_name == "weight" and name not in rule.zero_init_norms
        return values.fill_(1.0 if is_one else 0.0)
    if isinstance(module, nn.Conv2d):
        return _init_conv(values, module, own_name, "glorot" if name in rule.glorot_convs else rule.conv, generator)
    if isinstance(module, nn.Linear):
        return _init_linear(values, module, own_name, rule, generator)
    # Other layers keep the values of their constructor.
    return parameter.detach()


def _init_conv(values: Tensor, module: nn.Conv2d, own_name: str, rule: str, generator: torch.Generator) -> Tensor:
    if own_name == "bias":
        return values.zero_()
    area = module.kernel_size[0] * module.kernel_size[1]
    fan_in, fan_out = values.shape[1] * area, values.shape[0] * area
    if rule == "fan_out":
        return values.normal_(0.0, math.sqrt(2.0 / fan_out), generator=generator)
    if rule == "fan_in":
        return values.normal_(0.0, math.sqrt(2.0 / fan_in), generator=generator)
    if rule == "tf_fan_in":  # variance scaling, scale 1, truncated
        return _truncated_normal(values, math.sqrt(1.0 / fan_in) / _TRUNCATED_STD, generator)
    if rule == "tf_fan_out":  # variance scaling, scale 2, truncated; grouped convolutions use fan_in
        fan = fan_out if module.groups == 1 else fan_in
        return _truncated_normal(values, math.sqrt(2.0 / fan) / _TRUNCATED_STD, generator)
    if rule == "truncated":
        return _truncated_normal(values, _SMALL_STD, generator)
    if rule == "dirac":  # identity for the first channels, torch's default for the rest
        bound = 1.0 / math.sqrt(fan_in)
        values.uniform_(-bound, bound, generator=generator)
        torch.nn.init.dirac_(values[: values.shape[1]])
        return values
    if rule == "glorot":
        bound = math.sqrt(6.0 / (fan_in + fan_out))
        return values.uniform_(-bound, bound, generator=generator)
    raise ValueError(f"unknown convolution init {rule!r}")


def _init_linear(
    values: Tensor, module: nn.Linear, own_name: str, rule: InitScheme, generator: torch.Generator
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
        return _truncated_normal(values, _SMALL_STD, generator)
    raise ValueError(f"unknown linear init {rule.linear!r}")


def _truncated_normal(values: Tensor, std: float, generator: torch.Generator) -> Tensor:
    """A normal truncated at two standard deviations: values beyond are drawn again.

    torch's `trunc_normal_` draws other values before 2.13; these are the same with every release.
    """
    limit = values.new_tensor(2 * std).item()
    values.normal_(0.0, std, generator=generator)
    while (beyond := values.abs() > limit).any():
        values.copy_(torch.where(beyond, torch.empty_like(values).normal_(0.0, std, generator=generator), values))
    return values
