"""Weights and momentum under the names of NVIDIA's ConvNets are those of our networks."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from reconv.checkpoint.load_weights import load_weights, named_as
from reconv.models import build_model

EXAMPLES = {
    "resnet50": ("layer3.2.conv1.weight", "layers.2.2.conv1.weight"),
    "se_resnext101_32x4d": ("layer1.0.se.fc2.bias", "layers.0.0.squeeze.expand.bias"),
    "efficientnet_b0": ("features.2.1.block.1.1.running_var", "layers.1.block1.depsep.bn.running_var"),
}


def network(name: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(name, num_classes=8)


def their_name(name: str, names: set[str]) -> str:
    """NVIDIA's name of a tensor of ours."""
    if match := re.fullmatch(r"layer(\d)\.(\d+)\.(.+)", name):
        rest = match[3].replace("se.fc1.", "squeeze.squeeze.").replace("se.fc2.", "squeeze.expand.")
        return f"layers.{int(match[1]) - 1}.{match[2]}.{rest}"
    if match := re.fullmatch(r"(features\.([1-7])\.(\d+)\.block\.)(\d)\.(\w+)\.(.+)", name):
        expands = f"{match[1]}3.0.weight" in names
        part = ["expand", "depsep", "se", "proj"][not expands :][int(match[4])]
        layer = {"0": "conv", "1": "bn", "fc1": "squeeze", "fc2": "expand"}[match[5]]
        return f"layers.{int(match[2]) - 1}.block{match[3]}.{part}.{layer}.{match[6]}"
    for ours, theirs in (
        ("features.0.0.", "stem.conv."),
        ("features.0.1.", "stem.bn."),
        ("features.8.0.", "features.conv."),
        ("features.8.1.", "features.bn."),
        ("classifier.1.", "classifier.fc."),
    ):
        if name.startswith(ours):
            return theirs + name.removeprefix(ours)
    return name


def theirs(model: nn.Module, keep: str = "") -> dict[str, Tensor]:
    """The tensors of a network as NVIDIA's program saves them: linear layers in squeeze-and-excitation."""
    state = model.state_dict()
    found = {}
    for name, tensor in state.items():
        is_linear = re.search(r"se\.fc\d\.weight|block\.\d\.fc\d\.weight", name) is not None
        if keep in name:
            found[their_name(name, {*state})] = tensor[:, :, 0, 0] if is_linear else tensor
    return found


@pytest.mark.parametrize("name", EXAMPLES)
def test_every_tensor_is_loaded(name: str) -> None:
    ours, example = EXAMPLES[name]
    model = network(name)
    saved = theirs(model)
    assert their_name(ours, {*model.state_dict()}) == example and example in saved and ours not in saved
    assert load_weights(model, saved, strict=True).is_exact
    named = named_as(model, saved)
    assert {key: tensor.shape for key, tensor in named.items()} == {
        key: tensor.shape for key, tensor in model.state_dict().items()
    }


@pytest.mark.parametrize("name", EXAMPLES)
def test_momentum_of_some_parameters_is_named_by_the_weights(name: str) -> None:
    model = network(name)
    weights, momentum = theirs(model), theirs(model, keep=".block.1." if name == "efficientnet_b0" else "conv3")
    named = named_as(model, momentum, weights)
    parameters = dict(model.state_dict())
    assert len(named) == len(momentum) > 10
    assert all(parameters[key].shape == tensor.shape for key, tensor in named.items())


def test_a_network_that_has_such_names_keeps_them() -> None:
    model = nn.ModuleDict({"layers": nn.Sequential(nn.Sequential(nn.ModuleDict({"conv1": nn.Conv2d(1, 1, 1)})))})
    tensors = {"layers.0.0.conv1.weight": torch.ones(1, 1, 1, 1), "layers.0.0.conv1.bias": torch.ones(1)}
    assert named_as(model, tensors) == tensors
    assert load_weights(model, tensors, strict=True).is_exact
