"""Which parameters are decayed, by the type of the module that owns them.

Owns the named rules. Refuses to know optimizers. Invariant: every trainable parameter is in exactly one list.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)
RULES = ("all", "not-norm-bias", "not-norm")


@dataclass(frozen=True, slots=True)
class DecayGroups:
    """Trainable parameters by name, in the network's order."""

    decayed: dict[str, nn.Parameter]
    free: dict[str, nn.Parameter]


def decay_groups(model: nn.Module, rule: str) -> DecayGroups:
    """Sort the trainable parameters by a rule: all, not-norm-bias or not-norm."""
    if rule not in RULES:
        raise ValueError(f"unknown decay rule {rule!r}: one of {', '.join(RULES)}")
    groups = DecayGroups({}, {})
    seen: set[int] = set()
    for name, module in model.named_modules():
        for own_name, parameter in module.named_parameters(recurse=False):
            if not parameter.requires_grad or id(parameter) in seen:
                continue
            seen.add(id(parameter))
            in_norm = isinstance(module, NORMS)
            is_free = rule != "all" and (in_norm or (rule == "not-norm-bias" and own_name == "bias"))
            target = groups.free if is_free else groups.decayed
            target[f"{name}.{own_name}" if name else own_name] = parameter
    return groups
