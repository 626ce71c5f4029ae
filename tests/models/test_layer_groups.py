"""The layers of a network in order, from the input to the head."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from reconv.models import build_model
from reconv.models.layer_groups import layer_groups


def first_names(model: nn.Module) -> list[str]:
    groups = layer_groups(model)
    names = [name for group in groups for name in group]
    assert sorted(names) == sorted(name for name, _ in model.named_parameters())
    return [group[0].rsplit(".", 1)[0] for group in groups]


def test_layers_of_a_resnet_are_those_of_timm() -> None:
    """The stem with its norm, every block, the head."""
    model = build_model("resnet18", num_classes=10)
    blocks = [f"layer{stage}.{block}.conv1" for stage in range(1, 5) for block in range(2)]
    assert first_names(model) == ["conv1", *blocks, "fc"]
    assert layer_groups(model)[0] == ["conv1.weight", "bn1.weight", "bn1.bias"]


@pytest.mark.parametrize("name", ["mobilenet_v2", "googlenet", "efficientnet_b0", "fastnet_cifar", "ssd_resnet34"])
def test_every_parameter_of_our_networks_is_in_one_layer(name: str) -> None:
    with torch.device("meta"):
        names = first_names(build_model(name))
    assert len(names) > 4
    assert any(word in names[-1] for word in ("classifier", "fc", "head"))


class Plain(nn.Module):
    """A network of somebody else, in the manner of torchvision."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.zeros(3))
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU()
        self.layer1 = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 4, 3))
        self.fc = nn.Linear(4, 2)


def test_layers_of_other_networks_are_modules_with_their_norms() -> None:
    assert layer_groups(Plain()) == [
        ["token"],
        ["conv1.weight", "conv1.bias", "bn1.weight", "bn1.bias"],
        ["layer1.0.weight", "layer1.0.bias", "layer1.1.weight", "layer1.1.bias"],
        ["layer1.2.weight", "layer1.2.bias"],
        ["fc.weight", "fc.bias"],
    ]


@pytest.fixture
def timm(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A package with timm's `group_parameters`, which here takes the matcher's number of each name."""
    package, models = types.ModuleType("timm"), types.ModuleType("timm.models")

    def group_parameters(model: nn.Module, matcher: dict[str, int]) -> dict[int, list[str]]:
        found: dict[int, list[str]] = {}
        for name, _ in model.named_parameters():
            found.setdefault(matcher[name.split(".")[0]], []).append(name)
        return found

    vars(models)["group_parameters"] = group_parameters
    monkeypatch.setitem(sys.modules, "timm", package)
    monkeypatch.setitem(sys.modules, "timm.models", models)
    yield


class Matched(Plain):
    def group_matcher(self, coarse: bool) -> dict[str, int]:
        assert not coarse
        return {"fc": 2, "token": 0, "conv1": 0, "bn1": 0, "layer1": 1}


@pytest.mark.usefixtures("timm")
def test_layers_of_timms_networks_are_those_of_its_group_matcher() -> None:
    groups = layer_groups(Matched())
    assert [{name.split(".")[0] for name in group} for group in groups] == [
        {"token", "conv1", "bn1"},
        {"layer1"},
        {"fc"},
    ]
