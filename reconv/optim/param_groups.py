"""Selection of the parameters with weight decay: by the type of their module, or by name as in a vendor's code."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from reconv.core.errors import UsageError

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
EXCLUDES = ("none", "norm-bias", "norm", "nvidia-by-name")
_NORM_NAME = "bn"


@dataclass(frozen=True, slots=True)
class DecayGroups:
    """Trainable parameters by name, in the model's order; each is in exactly one group."""

    decay: dict[str, nn.Parameter]
    no_decay: dict[str, nn.Parameter]

    def subset(self, names: Collection[str]) -> DecayGroups:
        return DecayGroups(
            {name: p for name, p in self.decay.items() if name in names},
            {name: p for name, p in self.no_decay.items() if name in names},
        )

    def all(self) -> dict[str, nn.Parameter]:
        """The parameters of both groups, in the order of the optimizer state."""
        return {**self.decay, **self.no_decay}


@dataclass(frozen=True, slots=True)
class RateScale:
    """Factors between the rates of a parameter and those of the optimizer."""

    lr: float = 1.0
    decay_divisor: float = 1.0  # of the weight decay


def decay_groups(model: nn.Module, exclude: str) -> DecayGroups:
    """Split the trainable parameters by what weight decay excludes: none, norm-bias, norm or nvidia-by-name."""
    if exclude not in EXCLUDES:
        raise ValueError(f"unknown exclusion {exclude!r}: one of {', '.join(EXCLUDES)}")
    if exclude == "nvidia-by-name":
        _check_norm_names(model)
    groups = DecayGroups({}, {})
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{own_name}" if module_name else own_name
            group = groups.no_decay if _is_excluded(exclude, module, own_name, name) else groups.decay
            group[name] = parameter
    return groups


def _check_norm_names(model: nn.Module) -> None:
    """Reject the rule by name for a model without such names: it would silently decay all norm layers."""
    norms = [name for name, module in model.named_modules() if isinstance(module, NORMS)]
    if norms and not any(_NORM_NAME in name for name in norms):
        raise UsageError(
            f"optimizer.weight_decay_exclude nvidia-by-name matches no norm layer of this model "
            f"and would decay all {len(norms)}",
            why=f"it looks for {_NORM_NAME!r} in parameter names, but the norm layers here have names like {norms[0]}",
            hint="--set optimizer.weight_decay_exclude=norm, which goes by the type of the layer",
        )


def norm_biases(model: nn.Module) -> list[str]:
    """The names of the biases of all norm layers."""
    norms = ((name, module) for name, module in model.named_modules() if isinstance(module, NORMS))
    return [f"{name}.bias" if name else "bias" for name, module in norms if module.bias is not None]


def _is_excluded(exclude: str, module: nn.Module, own_name: str, name: str) -> bool:
    if exclude == "none":
        return False
    if exclude == "nvidia-by-name":
        return _NORM_NAME in name  # decays a ResNet's shortcut norms (downsample.1) and fc bias, as NVIDIA's code does
    return isinstance(module, NORMS) or (exclude == "norm-bias" and own_name == "bias")
