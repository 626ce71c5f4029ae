"""Which layers of a network kernels may compute.

Owns the switch. Refuses to know when it is worth it. Invariant: a network's parameters, keys and outputs at evaluation
do not depend on it.
"""

from __future__ import annotations

from torch import nn

from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.models.layers.conv import DepthwiseConv2d, MaxPool2d, SameMaxPool2d, StemConv2d
from reconv.models.layers.norm import SqueezeExcitation
from reconv.models.ssd import SSD, Extra

FUSED = (BatchNorm2d, DepthwiseConv2d, Extra, MaxPool2d, SameMaxPool2d, SqueezeExcitation, SSD, StemConv2d)


def use_kernels(model: nn.Module, is_on: bool = True) -> int:
    """Let kernels compute the layers that have a fused form, in training; how many those are."""
    layers = [module for module in model.modules() if isinstance(module, FUSED)]
    for layer in layers:
        layer.fused = is_on
    return len(layers)
