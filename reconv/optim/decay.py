"""Which parameters are decayed: by the type of the module that owns them, or as a vendor did, by name.

Owns the named rules. Refuses to know optimizers. Invariant: every trainable parameter is in exactly one list.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
RULES = ("all", "not-norm-bias", "not-norm", "nvidia-by-name")


@dataclass(frozen=True, slots=True)
class DecayGroups:
    """Trainable parameters by name, in the network's order."""

    decayed: dict[str, nn.Parameter]
    free: dict[str, nn.Parameter]


def decay_groups(model: nn.Module, rule: str) -> DecayGroups:
    """Sort the trainable parameters by a rule: all, not-norm-bias, not-norm or nvidia-by-name."""
    if rule not in RULES:
        raise ValueError(f"unknown decay rule {rule!r}: one of {', '.join(RULES)}")
    groups = DecayGroups({}, {})
    seen: set[int] = set()
    for module_name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            name = f"{module_name}.{own_name}" if module_name else own_name
            target = groups.free if _is_free(rule, module, own_name, name) else groups.decayed
            target[name] = parameter
    return groups


def norm_biases(model: nn.Module) -> list[str]:
    """The names of the biases of all norms."""
    named = ((name, module) for name, module in model.named_modules() if isinstance(module, NORMS))
    return [f"{name}.bias" if name else "bias" for name, module in named if module.bias is not None]


def _is_free(rule: str, module: nn.Module, own_name: str, name: str) -> bool:
    if rule == "all":
        return False
    if rule == "nvidia-by-name":
        return "bn" in name  # a ResNet's shortcut norms (downsample.1) and fc bias are decayed under this rule
    return isinstance(module, NORMS) or (rule == "not-norm-bias" and own_name == "bias")
