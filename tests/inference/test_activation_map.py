from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import reconv
from reconv.core.errors import UsageError
from reconv.inference.activation_map import activation_image, activation_maps
from reconv.models import build_model, init_weights

SIZE = 64
FAMILIES: list[tuple[str, dict[str, Any]]] = [
    ("resnet20_cifar", {}),
    ("resnet10", {}),
    ("resnet14", {"version": "v1", "stem": "deep"}),
    ("resnet10", {"norm": "group", "norm_groups": 4}),
    ("resnet10", {"version": "v2"}),
    ("resnext14_32x4d", {"se_units": 4}),
    ("mobilenet_v2", {}),
    ("efficientnet_b0", {}),
    ("googlenet", {}),
    ("fastnet_cifar", {}),
]


def with_statistics(model: nn.Module) -> nn.Module:
    """The model in eval mode, its norms with statistics and biases that keep values and positions apart."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._NormBase) and module.running_mean is not None:
            module.running_mean.copy_(0.1 * torch.randn(module.running_mean.shape, generator=generator))
            assert module.running_var is not None
            module.running_var.copy_(0.5 + torch.rand(module.running_var.shape, generator=generator))
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            parameter.data.copy_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def random_image(size: int = SIZE) -> Tensor:
    return torch.randn(1, 3, size, size, generator=torch.Generator().manual_seed(2))


def last_bias(model: nn.Module) -> Tensor:
    bias = [module for module in model.modules() if isinstance(module, nn.Linear)][-1].bias
    return torch.zeros(7) if bias is None else bias.detach()


@pytest.mark.parametrize(("name", "options"), FAMILIES, ids=lambda value: value if isinstance(value, str) else "")
def test_the_mean_of_a_map_and_the_bias_are_the_logit(name: str, options: dict[str, Any]) -> None:
    model = build_model(name, num_classes=7, **options)
    init_weights(model, 3)
    with_statistics(model).double()
    image = random_image().double()
    with torch.no_grad():
        logits = model(image)[0]
    maps = activation_maps(model, image, range(7))
    assert maps.shape[1] > 1 and maps.shape[2] > 1
    assert logits.std() > 1e-3
    bias = last_bias(model)
    assert torch.allclose(maps.mean((1, 2)).double() + bias, logits, rtol=1e-4, atol=1e-5 * float(logits.abs().max()))
    assert (maps.std((1, 2)) > 0).all()
    assert all(parameter.grad is None for parameter in model.parameters())


def test_the_map_of_a_resnet_is_its_last_features_weighted_by_the_class() -> None:
    model: Any = with_statistics(build_model("resnet20_cifar", num_classes=7))
    image = random_image(32)
    with torch.no_grad():
        features = model.final_norm(model.features(image))[0]
    expected = torch.einsum("ckl,c->kl", features, model.fc.weight[4].detach())
    assert torch.allclose(activation_maps(model, image, [4])[0], expected, rtol=1e-4, atol=1e-5)


class Flattened(nn.Module):
    """A network without global pooling; its last activation works in place."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 4, 3, 2, 1), nn.ReLU(inplace=True), nn.Conv2d(4, 6, 3, 2, 1, bias=False), nn.ReLU(inplace=True)
        )
        self.fc = nn.Linear(6 * 4 * 4, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.layers(x).flatten(1))
        return logits


class ChannelsLast(nn.Module):
    """A network whose maps are [n, rows, columns, channels], as in Swin; attention is before the pooling."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.mix = nn.Linear(8, 8)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patches(x).permute(0, 2, 3, 1)
        tokens = x.flatten(1, 2)
        x = F.scaled_dot_product_attention(tokens, tokens, tokens).view_as(x)
        logits: Tensor = self.fc(F.relu(self.mix(x)).mean((1, 2)))
        return logits


class Tokens(nn.Module):
    """A vision transformer in small: positions are mixed by attention, and the first one gives the logits."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 8, 4, 4)
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.fc = nn.Linear(8, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.fc(self.attention(tokens, tokens, tokens, need_weights=False)[0][:, 0])
        return logits


@pytest.mark.parametrize("network", [Flattened, ChannelsLast])
def test_networks_of_others_have_maps_as_well(network: type[nn.Module]) -> None:
    torch.manual_seed(5)
    model, image = network(3).eval(), random_image(16)
    maps = activation_maps(model, image, [0, 2])
    assert maps.shape == (2, 4, 4)
    expected = model(image).detach()[0, [0, 2]]
    assert torch.allclose(maps.mean((1, 2)) + last_bias(model)[[0, 2]], expected, atol=1e-5)


def test_a_network_without_a_map_of_positions_is_refused_with_the_reason() -> None:
    with pytest.raises(UsageError, match="map of positions"):
        activation_maps(Tokens(3).eval(), random_image(16), [0])
    with pytest.raises(UsageError, match="no class activation map"):
        activation_maps(nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 16, 3)), random_image(16), [0])


def test_the_picture_is_opaque_where_the_map_is_high_and_empty_where_it_is_negative() -> None:
    values = torch.full((8, 8), -1.0)
    values[6:, 6:] = 5.0
    opacity = np.asarray(activation_image(values, 64).convert("RGBA"))[:, :, 3]
    assert opacity.shape == (64, 64)
    assert opacity[4, 4] == 0
    assert opacity[60, 60] > 200
    assert not np.asarray(activation_image(torch.zeros(2, 2), 16).convert("RGBA"))[:, :, 3].any()


def test_a_predictor_gives_the_maps_of_its_image(classifier: Path, detector: Path) -> None:
    predictor = reconv.load(classifier, device="cpu", log=lambda text: None)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 30), dtype=np.uint8)
    sample = predictor.read(pixels)
    maps = predictor.activation_maps(sample, [3, 7])
    with torch.no_grad():
        logits = predictor.module(predictor.preprocess(pixels))[0, [3, 7]]
    assert torch.allclose(maps.mean((1, 2)) + last_bias(predictor.module)[[3, 7]], logits, rtol=1e-4, atol=1e-5)
    finder = reconv.load(detector, device="cpu", log=lambda text: None)
    with pytest.raises(UsageError, match="detector"):
        finder.activation_maps(finder.read(pixels), [0])
