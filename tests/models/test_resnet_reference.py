"""Every ResNet and ResNeXt that no other package has, against a second implementation that knows tensors only.

The second one is a loop over the names in a state dict, with strides and shortcuts by the papers' rules; it shares no
code with the networks.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.models import build_model, model_names

NAMES = [n for n in model_names() if n.startswith(("resnet", "resnext")) and n.endswith("_cifar")]
NAMES += ["resnet10", "resnet14", "resnext14_32x4d", "resnext26_32x4d"]


def run(state: dict[str, Tensor], x: Tensor) -> Tensor:
    def conv(name: str, y: Tensor, stride: int = 1) -> Tensor:
        weight = state[f"{name}.weight"]
        return F.conv2d(y, weight, None, stride, weight.shape[-1] // 2, groups=y.shape[1] // weight.shape[1])

    def norm(name: str, y: Tensor) -> Tensor:
        mean, var, gamma, beta = (
            state[f"{name}.{part}"][:, None, None] for part in ("running_mean", "running_var", "weight", "bias")
        )
        return (y - mean) / (var + 1e-5).sqrt() * gamma + beta

    is_imagenet = state["conv1.weight"].shape[-1] == 7
    x = norm("bn1", conv("conv1", x, 2 if is_imagenet else 1)).relu()
    x = F.max_pool2d(x, 3, 2, 1) if is_imagenet else x
    blocks = sorted({tuple(map(int, n[5:].split(".")[:2])) for n in state if n.startswith("layer")})
    for stage, number in blocks:
        at, stride = f"layer{stage}.{number}", 2 if stage > 1 and number == 0 else 1
        if f"{at}.conv3.weight" in state:
            y = norm(f"{at}.bn1", conv(f"{at}.conv1", x)).relu()
            y = norm(f"{at}.bn2", conv(f"{at}.conv2", y, stride)).relu()
            y = norm(f"{at}.bn3", conv(f"{at}.conv3", y))
        else:
            y = norm(f"{at}.bn1", conv(f"{at}.conv1", x, stride)).relu()
            y = norm(f"{at}.bn2", conv(f"{at}.conv2", y))
        if f"{at}.downsample.0.weight" in state:
            x = norm(f"{at}.downsample.1", conv(f"{at}.downsample.0", x, stride))
        elif y.shape != x.shape:
            padded = torch.zeros_like(y)
            first = (y.shape[1] - x.shape[1]) // 2
            padded[:, first : first + x.shape[1]] = x[:, :, ::stride, ::stride]
            x = padded
        x = (x + y).relu()
    return F.linear(x.mean((2, 3)), state["fc.weight"], state["fc.bias"])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shortcut", ["A", "B"])
def test_outputs_equal_the_functional_reference(name: str, shortcut: str) -> None:
    assert len(NAMES) >= 24
    model = build_model(name, num_classes=7, shortcut=shortcut).double().eval()
    draw = torch.Generator().manual_seed(3)
    for key, value in model.state_dict().items():
        if key.endswith(("running_mean", "bias")):
            value.copy_(torch.randn(value.shape, generator=draw) * 0.1)
        elif value.ndim == 1:  # gammas and variances
            value.copy_(torch.rand(value.shape, generator=draw) + 0.5)
    images = torch.randn(2, 3, 16, 16, generator=draw, dtype=torch.float64)
    with torch.no_grad():
        torch.testing.assert_close(model(images), run(model.state_dict(), images), rtol=1e-9, atol=1e-9)
