"""A folded network has the outputs of the original, and keeps the norms that cannot be folded."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from reconv.inference.backends.fold import fold_batch_norms
from reconv.models import build_model
from reconv.models.layers.batch_norm import BatchNormAct2d

CASES: dict[str, tuple[str, dict[str, Any], int]] = {
    "resnet": ("resnet18", {}, 64),
    "grouped": ("resnext50_32x4d", {}, 64),
    "depthwise": ("mobilenet_v2", {}, 64),
    "branches": ("googlenet", {}, 64),
    "squeeze": ("efficientnet_b0", {"padding": "same"}, 64),
    "cifar": ("resnet20_cifar", {}, 32),
    "before the convolution": ("resnet18", {"version": "v2", "stem": "cifar"}, 32),
}


def _trained(model: nn.Module) -> nn.Module:
    """The network in fp64 with norms that do something."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            assert module.running_mean is not None and module.running_var is not None
            module.running_mean.copy_(torch.randn(module.num_features, generator=generator) / 4)
            module.running_var.copy_(0.5 + torch.rand(module.num_features, generator=generator))
            nn.init.uniform_(module.weight, 0.5, 1.5, generator=generator)
            nn.init.normal_(module.bias, 0, 0.2, generator=generator)
    return model.double().eval()


def _num_norms(model: nn.Module) -> int:
    return sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())


@pytest.mark.parametrize("case", CASES)
def test_a_folded_network_has_the_outputs_of_the_original(case: str) -> None:
    name, options, side = CASES[case]
    model = _trained(build_model(name, num_classes=7, **options))
    folded, num_folded = fold_batch_norms(model, (3, side, side))
    images = torch.randn(2, 3, side, side, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images), rtol=1e-9, atol=1e-9)
    assert num_folded > 0
    assert _num_norms(folded) == _num_norms(model) - num_folded


def test_every_norm_of_a_resnet_is_folded_and_the_original_is_unchanged() -> None:
    model = _trained(build_model("resnet50"))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    folded, num_folded = fold_batch_norms(model, (3, 64, 64))
    assert (num_folded, _num_norms(folded), _num_norms(model)) == (53, 0, 53)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


class _Shared(nn.Module):
    """A convolution whose output is read by its norm and by a sum."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.conv(x)
        out: torch.Tensor = x + self.norm(x)
        return out


class _Twice(nn.Module):
    """A convolution that is called twice, once before its norm."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3)
        self.norm = nn.BatchNorm2d(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.norm(self.conv(self.conv(x)))
        return out


@pytest.mark.parametrize("kind", [_Shared, _Twice])
def test_a_norm_is_kept_if_its_conv_has_other_consumers(kind: type[nn.Module]) -> None:
    model = _trained(kind())
    folded, num_folded = fold_batch_norms(model, (3, 8, 8))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert num_folded == 0
    with torch.no_grad():
        assert torch.equal(folded(images), model(images))


def test_the_activation_of_an_external_norm_is_kept() -> None:
    model = _trained(nn.Sequential(nn.Conv2d(3, 4, 3), BatchNormAct2d(4, nn.Identity(), nn.ReLU())))
    folded, num_folded = fold_batch_norms(model, (3, 8, 8))
    images = torch.randn(2, 3, 8, 8, dtype=torch.float64)
    assert num_folded == 1
    with torch.no_grad():
        torch.testing.assert_close(folded(images), model(images))
        assert float(folded(images).min()) == 0
