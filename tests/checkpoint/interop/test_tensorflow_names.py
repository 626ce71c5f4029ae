"""TensorFlow's ResNets, under torchvision's names, give the logits that TensorFlow computed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from reconv.checkpoint.interop.tensorflow import read_tensorflow
from reconv.checkpoint.interop.tensorflow_names import to_resnet
from reconv.checkpoint.load_weights import load_weights
from reconv.core.errors import CheckpointError
from reconv.models import build_model

FIXTURES = Path(__file__).parent / "fixtures" / "tensorflow"
EXPECTED: dict[str, Any] = json.loads((FIXTURES / "expected.json").read_text())
NORM_PARTS = ("gamma", "beta", "moving_mean", "moving_variance")


def images() -> Tensor:
    """The images of fixtures/make_tensorflow.py, channels first."""
    index = np.arange(np.prod(EXPECTED["image_shape"]), dtype=np.float64)
    values = np.sin(index * 0.37 + (index % 7)).astype(np.float32).reshape(EXPECTED["image_shape"])
    return torch.from_numpy(values).permute(0, 3, 1, 2)


def network(which: str) -> nn.Module:
    """Our network of the shape that the fixture has, with other weights."""
    name, options = {
        "official": ("resnet50", {}),
        "scoped": ("resnext50_32x4d", {"groups": 2, "width_per_group": 32}),
        "preactivated": ("resnet18", {"version": "v2", "project_first": True}),
    }[which]
    shape = {"depths": tuple(EXPECTED["depths"]), "width": EXPECTED["width"]}
    return build_model(name, num_classes=11, padding="same", **shape, **options).eval()


@pytest.mark.parametrize("which", ["official", "scoped", "preactivated"])
def test_loaded_weights_give_the_logits_of_tensorflow(which: str) -> None:
    model = network(which)
    load_weights(model, to_resnet(read_tensorflow(FIXTURES / which)), strict=True)
    expected = torch.tensor(EXPECTED[which]["logits"], dtype=torch.float32)
    with torch.no_grad():
        logits = model(images())
    torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_the_logits_differ_without_same_padding() -> None:
    shape = {"depths": tuple(EXPECTED["depths"]), "width": EXPECTED["width"]}
    model = build_model("resnet50", num_classes=11, **shape).eval()
    load_weights(model, to_resnet(read_tensorflow(FIXTURES / "official")), strict=True)
    with torch.no_grad():
        difference = (model(images()) - torch.tensor(EXPECTED["official"]["logits"])).abs().max()
    assert difference > 0.05


def test_both_naming_schemes_give_the_same_names() -> None:
    official, scoped = (to_resnet(read_tensorflow(FIXTURES / name)) for name in ("official", "scoped"))
    assert official.keys() == scoped.keys()
    assert scoped["layer1.0.conv2.weight"].shape == (4, 2, 3, 3)  # of two groups


def test_the_background_class_can_be_dropped() -> None:
    tensors = read_tensorflow(FIXTURES / "official")
    all_classes, dropped = to_resnet(tensors), to_resnet(tensors, drop_background=True)
    assert torch.equal(dropped["fc.weight"], all_classes["fc.weight"][1:])
    assert torch.equal(dropped["fc.bias"], all_classes["fc.bias"][1:])
    assert torch.equal(dropped["conv1.weight"], all_classes["conv1.weight"])


def numbered(kernels: list[int], num_norms: int, scope: str = "resnet_model/") -> dict[str, Tensor]:
    """Tensors in the official names, each kernel filled with its number."""

    def numbers(kind: str, count: int) -> list[str]:
        return [f"{scope}{kind}_{i}" if i else f"{scope}{kind}" for i in range(count)]

    tensors = {
        f"{n}/kernel": torch.full((k, k, 2, 2), float(i))
        for i, (n, k) in enumerate(zip(numbers("conv2d", len(kernels)), kernels, strict=True))
    }
    for name in numbers("batch_normalization", num_norms):
        tensors |= {f"{name}/{part}": torch.ones(2) for part in NORM_PARTS}
    return tensors


@pytest.mark.parametrize("name", ["resnet18", "resnet34", "resnet50", "resnet101"])
def test_creation_order_gives_the_stage_depths_of_every_resnet(name: str) -> None:
    is_basic = name in ("resnet18", "resnet34")
    model = build_model(name, project_first=True)
    depths = [len(model.get_submodule(f"layer{i}")) for i in range(1, 5)]
    block = [3, 3] if is_basic else [1, 3, 1]
    kernels = [7]
    for depth in depths:
        kernels += [1, *block * depth]
    state = to_resnet(numbered(kernels, len(kernels)))
    modules = {key.rpartition(".")[0] for key in model.state_dict()} - {"fc"}
    assert {key.rpartition(".")[0] for key in state} == modules


def test_layers_are_ordered_by_number_not_by_name() -> None:
    kernels = [7, *[1, 1, 3, 1], *[1, 3, 1] * 3]
    tensors = numbered(kernels, len(kernels))
    state = to_resnet(dict(sorted(tensors.items())))
    assert state["layer1.0.downsample.0.weight"].unique().item() == 1
    assert state["layer1.0.conv1.weight"].unique().item() == 2
    assert state["layer1.2.conv3.weight"].unique().item() == 10
    assert state["layer1.3.conv1.weight"].unique().item() == 11


def test_the_stage_without_projection_is_the_first() -> None:
    state = to_resnet(numbered([7, 3, 3, 3, 3, 1, 3, 3], 8, scope="resnet34/"))
    blocks = {key.split(".conv")[0] for key in state if ".conv" in key}
    assert blocks == {"layer1.0", "layer1.1", "layer2.0"}
    assert "layer1.0.downsample.0.weight" not in state
    assert "layer2.0.downsample.0.weight" in state


def test_two_networks_need_a_scope() -> None:
    tensors = {**numbered([7, 3, 3], 3, "teacher/"), **numbered([7, 3, 3, 3, 3], 5, "student/")}
    with pytest.raises(CheckpointError, match=r"several models\n(.|\n)*student, teacher"):
        to_resnet(tensors)
    assert "layer1.1.conv1.weight" in to_resnet(tensors, scope="student")
    assert "layer1.1.conv1.weight" not in to_resnet(tensors, scope="teacher")


@pytest.mark.parametrize(
    ("tensors", "reason"),
    [
        ({}, "no supported ResNet"),
        ({"w/.ATTRIBUTES/VARIABLE_VALUE": torch.ones(2)}, "tensors such as w/.ATTRIBUTES"),
        (numbered([7, 1, 3, 3], 2), "4 convolutions and 2 norms"),
        (numbered([7, 3, 5], 3), r"layer1.0 has kernels \[3, 5\]"),
        (numbered([7, 1, 1, 3], 4), r"layer1.0 has kernels \[1, 3\]"),
        (numbered([7, 3, 3], 3) | {"resnet_model/conv2d_1/bias": torch.ones(2)}, "have biases"),
        (numbered([7, 3, 3], 3) | {"resnet_model/conv2d_1/kernel": torch.ones(2)}, "four dimensions"),
        (
            numbered([7, 3, 3], 3) | {"resnet_model/batch_normalization_1/beta": torch.ones(3)},
            "the norm at layer1.0.bn1",
        ),
        (numbered([7, 3, 3], 3) | {"resnet_model/dense/bias": torch.ones(3)}, "a bias but no kernel"),
        (
            numbered([7, 3, 3], 3) | {f"resnet_model/dense{i}/kernel": torch.ones(2, 3) for i in ("", "_1")},
            "2 dense layers",
        ),
    ],
)
def test_inconsistent_variables_are_rejected_with_the_reason(tensors: dict[str, Tensor], reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        to_resnet(tensors)
