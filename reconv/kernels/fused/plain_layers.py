"""Layers whose call kernels may replace: known activations, and no hooks that have to see what goes in or out."""

from __future__ import annotations

from torch import nn
from torch.nn.modules.module import _has_any_global_hook

from reconv.kernels.reference import Activation

ACTIVATIONS: dict[type[nn.Module], Activation] = {
    nn.Identity: "none",
    nn.ReLU: "relu",
    nn.ReLU6: "relu6",
    nn.SiLU: "silu",
    nn.Hardswish: "hardswish",
}


def has_hooks(module: nn.Module) -> bool:
    """True if calling a module does more than its class's forward pass: then it must be called."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return any(hooks) or "forward" in vars(module) or _has_any_global_hook()


def is_fusible_act(module: nn.Module) -> bool:
    """True if kernels know this activation, and nothing else has to see its input or output."""
    return type(module) in ACTIVATIONS and not has_hooks(module)
