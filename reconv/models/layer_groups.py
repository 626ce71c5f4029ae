"""The layers of a model in order, for learning rates that depend on the depth (layer-wise learning rate decay).

A parameter's rate is that of the step times a constant of its layer (tests/optim/test_rate_scales.py).
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from reconv.models.architecture import ReconvModel

_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def layer_groups(model: nn.Module) -> list[list[str]]:
    """The names of all parameters by layer, from the input to the head.

    Layers are the stages of our models, what timm's `group_matcher` finds in timm's, and else the top-level modules,
    with the modules of a top-level nn.Sequential counted one by one.
    """
    group_matcher: Callable[..., Any] | None = getattr(model, "group_matcher", None)
    if group_matcher is not None and "timm" in sys.modules:
        by_layer = importlib.import_module("timm.models").group_parameters(model, group_matcher(coarse=False))
        return [list(by_layer[layer]) for layer in sorted(by_layer)]
    if isinstance(model, ReconvModel):
        return _by_module(model, [module for _, module in model.stages()])
    return _by_module(model, _layers(model))


def _by_module(model: nn.Module, layers: list[nn.Module]) -> list[list[str]]:
    """The names of the parameters of each layer that has any; those of no layer, such as tokens, come first."""
    layer_of = {id(p): number for number, layer in reversed([*enumerate(layers, 1)]) for p in layer.parameters()}
    groups: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters():
        groups.setdefault(layer_of.get(id(parameter), 0), []).append(name)
    return [groups[number] for number in sorted(groups)]


def _layers(model: nn.Module) -> list[nn.Module]:
    """The modules of a model of others, each with the norm that follows it."""
    layers: list[nn.Module] = []
    for module in _modules(model):
        if isinstance(module, _NORMS) and layers:
            layers[-1] = nn.ModuleList([layers[-1], module])
        elif any(True for _ in module.parameters()):
            layers.append(module)
    return layers


def _modules(model: nn.Module) -> Iterator[nn.Module]:
    for module in model.children():
        yield from module.children() if type(module) is nn.Sequential else (module,)
