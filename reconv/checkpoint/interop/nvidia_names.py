"""Names of NVIDIA's ConvNets (DeepLearningExamples since 2020), in its checkpoints and published weights.

`layers.0.1.conv2` is torchvision's `layer1.1.conv2`; EfficientNets number stages and blocks (`layers.2.block1.depsep`).
Squeeze-and-excitation is two linear layers there, and two 1x1 convolutions here.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

_RESIDUAL = re.compile(r"layers\.(\d+)\.(\d+)\.(.+)")
_MOBILE = re.compile(r"(layers\.(\d+)\.block(\d+)\.)(expand|depsep|se|proj)\.(\w+)(\..+)")
_PARTS = {
    "squeeze.squeeze.": "se.fc1.",
    "squeeze.expand.": "se.fc2.",
}
_AROUND = {
    "stem.conv.": "features.0.0.",
    "stem.bn.": "features.0.1.",
    "classifier.fc.": "classifier.1.",
}
_LAYERS = {"conv": "0", "bn": "1", "squeeze": "fc1", "expand": "fc2"}


def to_torchvision(tensors: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by parameter (weights, averages, momentum) under torchvision's names; others stay as they are.

    `weights` are all of the network's, whose names say what a block has.
    """
    renamed = {}
    last = 1 + max((int(match[2]) for name in weights if (match := _MOBILE.fullmatch(name))), default=-2)
    for name, tensor in tensors.items():
        new = _residual(name) if last < 0 else _mobile(name, weights, last)
        is_linear_here = new != name and re.search(r"\.fc[12]\.weight$", new) and tensor.dim() == 2
        renamed[new] = tensor[:, :, None, None] if is_linear_here else tensor
    return renamed


def _residual(name: str) -> str:
    """The name in a ResNet."""
    match = _RESIDUAL.fullmatch(name)
    if match is None:
        return name
    rest = next((new + match[3].removeprefix(old) for old, new in _PARTS.items() if match[3].startswith(old)), match[3])
    return f"layer{int(match[1]) + 1}.{match[2]}.{rest}"


def _mobile(name: str, weights: Mapping[str, Tensor], last: int) -> str:
    """The name in an EfficientNet whose last stage of blocks has this number, counted from 1."""
    match = _MOBILE.fullmatch(name)
    if match is None:
        around = {**_AROUND, "features.conv.": f"features.{last + 1}.0.", "features.bn.": f"features.{last + 1}.1."}
        return next((new + name.removeprefix(old) for old, new in around.items() if name.startswith(old)), name)
    parts = [part for part in ("expand", "depsep", "se", "proj") if _has(weights, match[1] + part)]
    number = parts.index(match[4]) if match[4] in parts else 0
    return f"features.{int(match[2]) + 1}.{match[3]}.block.{number}.{_LAYERS.get(match[5], match[5])}{match[6]}"


def _has(weights: Mapping[str, Tensor], module: str) -> bool:
    layer = "squeeze" if module.endswith(".se") else "conv"
    return f"{module}.{layer}.weight" in weights
