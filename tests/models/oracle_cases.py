"""The weights and images from which the fixtures in this folder were computed.

`fixtures/make_outputs.py` runs other packages' networks on these weights and stores a few outputs; the tests run ours.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.core import random as keys
from reconv.models import init_weights, model_spec

FIXTURES = Path(__file__).parent / "fixtures" / "outputs.json"
NUM_CLASSES = 17
NUM_SHOWN = 6
SEED = 11


@dataclass(frozen=True)
class Case:
    """One of our networks, and the network of another package that must agree with it."""

    name: str
    oracle: str
    side: int = 64
    options: dict[str, Any] = field(default_factory=dict)
    is_large: bool = False

    @property
    def id(self) -> str:
        return "-".join([self.name, *(f"{k}={v}" for k, v in sorted(self.options.items()))])


CASES = (
    *(Case(name, f"torchvision:{name}") for name in ("resnet18", "resnet34", "resnet50")),
    *(Case(name, f"torchvision:{name}") for name in ("resnext50_32x4d", "mobilenet_v2")),
    *(Case(f"efficientnet_b{i}", f"torchvision:efficientnet_b{i}") for i in (0, 1, 5)),
    *(Case(f"efficientnet_b{i}", f"torchvision:efficientnet_b{i}", is_large=True) for i in (2, 3, 4, 6, 7)),
    *(
        Case(name, f"torchvision:{name}", is_large=True)
        for name in ("resnet101", "resnet152", "resnext101_32x8d", "wide_resnet50_2", "wide_resnet101_2")
    ),
    Case("googlenet", "torchvision:googlenet", 96),
    Case("googlenet", "torchvision:googlenet", 96, {"aux_heads": False}),
    Case("googlenet", "torchvision:googlenet", 96, {"transform_input": True}),
    Case("resnet26", "timm:resnet26"),
    Case("resnet200", "timm:resnet200", is_large=True),
    Case("resnext101_32x4d", "timm:resnext101_32x4d"),
    Case("resnet50", "timm:resnet50_gn", options={"norm": "group"}),
    Case("resnet50", "timm:resnet50c", options={"stem": "deep"}),
    Case("resnet50", "torchvision:resnet50", options={"version": "v1"}),
    Case("resnet18", "timm:resnetv2_18", options={"version": "v2"}),
    Case("resnet50", "timm:resnetv2_50", options={"version": "v2"}),
    Case("se_resnext101_32x4d", "timm:seresnext101_32x4d", options={"se_units": 0, "se_ratio": 16}),
    Case("efficientnet_b0", "timm:tf_efficientnet_b0", 63, {"padding": "same", "norm_eps": 1e-3}),
    Case("efficientnet_b0", "timm:tf_efficientnet_b0", 64, {"padding": "same", "norm_eps": 1e-3, "in_channels": 1}),
)


def network(case: Case) -> nn.Module:
    """Our network in float64 with drawn weights, norms and running statistics."""
    with torch.device("meta"):
        model: nn.Module = model_spec(case.name, NUM_CLASSES, **case.options).build()
    model = model.to_empty(device="cpu").double()
    init_weights(model, SEED)
    for name, tensor in model.state_dict().items():
        if not tensor.is_floating_point() or tensor.dim() > 1:
            continue
        drawn = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(keys.key(SEED, name) >> 1))
        tensor.copy_(drawn + 0.5 if name.endswith(("weight", "running_var")) else drawn * 0.2 - 0.1)
    return model


def images(case: Case) -> Tensor:
    """Two images in float64."""
    channels = case.options.get("in_channels", 3)
    drawn = torch.randn(2, channels, case.side, case.side, generator=torch.Generator().manual_seed(SEED))
    return drawn.double()


def shown(logits: Tensor) -> list[list[float]]:
    """The first logits of each image, and the sum of all magnitudes, relative to their largest."""
    rows = torch.cat([logits[:, :NUM_SHOWN], logits.abs().sum(1, keepdim=True)], 1)
    return [[float(f"{value:.10g}") for value in row] for row in rows.tolist()]
