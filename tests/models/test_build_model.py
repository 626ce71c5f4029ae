from __future__ import annotations

import sys
import types

import pytest
import torch
from torch import nn

from reconv.core.errors import UsageError
from reconv.models import AuxOutput, ReconvModel, build_model, init_weights, stages_of
from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.models.layers.dropout import Dropout, KeyedRandomLayer


def num_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_an_unknown_model_error_names_the_closest_one() -> None:
    with pytest.raises(UsageError, match="resnet500") as caught:
        build_model("resnet500")
    assert "resnet50" in str(caught.value)


def test_an_unknown_option_error_lists_the_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        build_model("resnet18", widht=32)
    assert "widht" in str(caught.value)
    assert "did you mean width" in str(caught.value)
    assert "norm_eps" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("shortcut", "C", "A, B"),
        ("width", "wide", "whole number"),
        ("norm_eps", "tiny", "number"),
        ("width", 0, "width"),
    ],
)
def test_an_option_of_the_wrong_type_is_rejected_with_a_reason(option: str, value: object, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_model("resnet20_cifar", **{option: value})
    assert message in str(caught.value)


def test_depths_may_be_a_list() -> None:
    model = build_model("resnet20_cifar", num_classes=10, depths=[1, 1, 1])
    assert num_parameters(model) == num_parameters(build_model("resnet8_cifar", num_classes=10))


def test_building_does_not_advance_the_global_generator() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model("resnet8_cifar")
    assert torch.equal(torch.rand(4), expected)


def test_init_depends_only_on_seed_and_parameter_name() -> None:
    small = build_model("resnet8_cifar", num_classes=10)
    large = build_model("resnet20_cifar", num_classes=10)
    init_weights(small, seed=7)
    init_weights(large, seed=7)
    shared = dict(large.named_parameters())
    names = [name for name, p in small.named_parameters() if shared[name].shape == p.shape]
    assert len(names) > 15
    for name in names:
        assert torch.equal(shared[name], dict(small.named_parameters())[name]), name
    assert not torch.equal(shared["layer1.0.conv1.weight"], shared["layer1.0.conv2.weight"])
    before = small.conv1.weight.clone()
    init_weights(small, seed=8)
    assert not torch.equal(before, small.conv1.weight)


def test_init_is_the_same_in_float64() -> None:
    single, double = build_model("resnet8_cifar"), build_model("resnet8_cifar").double()
    init_weights(single, seed=1)
    init_weights(double, seed=1)
    for (name, a), b in zip(single.named_parameters(), double.parameters(), strict=True):
        assert torch.equal(a.double(), b), name


@pytest.mark.parametrize(
    ("rule", "expected_std"),
    [("fan_out", (2 / (64 * 9)) ** 0.5), ("fan_in", (2 / (32 * 9)) ** 0.5), ("tf_fan_in", (1 / (32 * 9)) ** 0.5)],
)
def test_conv_init_schemes_have_the_expected_std(rule: str, expected_std: float) -> None:
    model = build_model("resnet20_cifar", conv_init=rule)
    weight = dict(model.named_parameters())["layer3.0.conv1.weight"]
    assert weight.shape == (64, 32, 3, 3)
    assert weight.std().item() == pytest.approx(expected_std, rel=0.02)
    if rule == "tf_fan_in":
        assert weight.abs().max().item() <= 2 * expected_std / 0.8796 + 1e-6


FOLDED = {
    "resnet10": {},
    "resnet14": {"version": "v2"},
    "resnet8_cifar": {},
    "resnext11_cifar": {"norm": "proxy"},
    "mobilenet_v2": {},
    "googlenet": {},
    "efficientnet_b0": {},
    "efficientnet_cifar": {"norm": "group", "norm_groups": 4},
}


def tensors_of(output: torch.Tensor | AuxOutput) -> list[torch.Tensor]:
    return [output.logits, *output.auxiliary] if isinstance(output, AuxOutput) else [output]


@pytest.mark.parametrize("name", FOLDED)
@pytest.mark.parametrize("is_training", [False, True])
def test_the_stages_in_order_equal_the_forward_pass(name: str, is_training: bool) -> None:
    model = build_model(name, num_classes=7, **FOLDED[name]).train(is_training)
    for module in model.modules():
        if isinstance(module, KeyedRandomLayer):
            module.rate = 0.0
    assert isinstance(model, ReconvModel)
    images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    stages = stages_of(model)
    assert len({stage for stage, _ in stages}) == len(stages) >= 5
    folded = images
    for _, stage in stages:
        folded = stage(folded)
    whole = model(images)
    for a, b in zip(tensors_of(folded), tensors_of(whole), strict=True):
        assert torch.equal(a, b)
    in_stages = {id(p) for _, stage in stages for p in stage.parameters()}
    assert in_stages == {id(p) for p in model.parameters()}


def test_every_parameter_of_every_family_gets_a_gradient() -> None:
    for name, options in FOLDED.items():
        model = build_model(name, num_classes=7, **options).train()
        output = model(torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0)))
        sum(part.pow(2).sum() for part in tensors_of(output)).backward()
        without = [n for n, p in model.named_parameters() if p.grad is None]
        assert without == [], name


def test_a_missing_package_error_says_how_to_install_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "timm", None)  # what Python does for a module that cannot be found
    with pytest.raises(UsageError, match="timm is not installed") as caught:
        build_model("timm:resnet50")
    assert "pip install 'reconv[timm]'" in caught.value.hint


def test_layers_of_an_external_network_are_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    class BatchNormAct2d(nn.BatchNorm2d):  # as timm names and builds its own
        def __init__(self, num_features: int) -> None:
            super().__init__(num_features)
            self.drop, self.act = nn.Identity(), nn.SiLU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.act(self.drop(super().forward(x)))

    def create_model(name: str, num_classes: int) -> nn.Module:
        layers = [nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Dropout(0.5), BatchNormAct2d(4), nn.Flatten()]
        return nn.Sequential(*layers, nn.Linear(4, num_classes))

    package = types.ModuleType("timm")
    package.create_model = create_model
    package.list_models = lambda: ["tiny"]
    monkeypatch.setitem(sys.modules, "timm", package)
    torch.manual_seed(1)
    model = build_model("timm:tiny", num_classes=5)
    torch.manual_seed(2)
    again = build_model("timm:tiny", num_classes=5)
    assert type(model[1]) is BatchNorm2d and isinstance(model[2], Dropout) and isinstance(model[3], BatchNorm2d)
    theirs = create_model("tiny", 5)
    theirs.load_state_dict(model.state_dict())
    x = torch.randn(4, 3, 3, 3)
    assert torch.equal(model.eval()(x), theirs.eval()(x))
    assert torch.equal(model[0].weight, again[0].weight)
    init_weights(model, seed=4)
    assert not torch.equal(model[0].weight, again[0].weight)
    assert stages_of(model) == [("network", model)]
    with pytest.raises(UsageError, match="did you mean timm:tiny"):
        build_model("timm:tinny")
    with pytest.raises(UsageError, match="cannot be built"):
        build_model("timm:tiny", depth=3)


def test_building_with_a_seed_equals_init_weights() -> None:
    before = torch.get_rng_state()
    for name in ("resnet10", "mobilenet_v2", "ssd_resnet34"):
        later = build_model(name, num_classes=5)
        init_weights(later, 3)
        values = build_model(name, num_classes=5, seed=3).state_dict()
        assert len(values) > 20 and all(torch.equal(values[key], value) for key, value in later.state_dict().items())
    assert torch.equal(torch.get_rng_state(), before)
