"""Which parameters are decayed: by the type of the module that owns them, or as a vendor did, by name.

Owns the named rules. Refuses to know optimizers. Invariant: every trainable parameter is in exactly one list.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from torch import nn

from reconv.errors import UsageError

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
EXCLUDES = ("none", "norm-bias", "norm", "nvidia-by-name")
_NORM_NAME = "bn"


@dataclass(frozen=True, slots=True)
class DecayGroups:
    """Trainable parameters by name, in the network's order."""

    decayed: dict[str, nn.Parameter]
    free: dict[str, nn.Parameter]

    def only(self, names: Collection[str]) -> DecayGroups:
        """Those of the parameters that are named."""
        return DecayGroups(
            {name: p for name, p in self.decayed.items() if name in names},
            {name: p for name, p in self.free.items() if name in names},
        )


def decay_groups(model: nn.Module, exclude: str) -> DecayGroups:
    """Split the trainable parameters by what weight decay excludes: none, norm-bias, norm or nvidia-by-name."""
    if exclude not in EXCLUDES:
        raise ValueError(f"unknown exclusion {exclude!r}: one of {', '.join(EXCLUDES)}")
    if exclude == "nvidia-by-name":
        _refuse_nameless_norms(model)
    groups = DecayGroups({}, {})
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{own_name}" if module_name else own_name
            target = groups.free if _is_free(exclude, module, own_name, name) else groups.decayed
            target[name] = parameter
    return groups


def _refuse_nameless_norms(model: nn.Module) -> None:
    """Refuse the rule by name where no norm of the network has such a name: it would silently decay all of them."""
    norms = [name for name, module in model.named_modules() if isinstance(module, NORMS)]
    if norms and not any(_NORM_NAME in name for name in norms):
        raise UsageError(
            f"optimizer.weight_decay_exclude nvidia-by-name matches no norm of this network "
            f"and would decay all {len(norms)}",
            why=f"it goes by {_NORM_NAME!r} in a name, and here norms are called {norms[0]}, as in other families",
            then="--set optimizer.weight_decay_exclude=norm, which goes by the kind of a layer",
        )


def norm_biases(model: nn.Module) -> list[str]:
    """The names of the biases of all norms."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, NORMS))
    return [f"{name}.bias" if name else "bias" for name, module in named if module.bias is not None]


def _is_free(exclude: str, module: nn.Module, own_name: str, name: str) -> bool:
    if exclude == "none":
        return False
    if exclude == "nvidia-by-name":
        return _NORM_NAME in name  # a ResNet's shortcut norms (downsample.1) and fc bias are decayed under this rule
    return isinstance(module, NORMS) or (exclude == "norm-bias" and own_name == "bias")
