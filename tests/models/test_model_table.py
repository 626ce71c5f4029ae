from __future__ import annotations

import pytest
import torch

from reconv.errors import UsageError
from reconv.models import build_model, initialise, model_names
from reconv.models.network import Network


def num_parameters(model: torch.nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_an_unknown_model_names_the_nearest_one() -> None:
    with pytest.raises(UsageError, match="resnet500") as caught:
        build_model("resnet500")
    assert "resnet50" in str(caught.value)


def test_an_unknown_option_names_the_valid_ones() -> None:
    with pytest.raises(UsageError) as caught:
        build_model("resnet18", widht=32)
    assert "widht" in str(caught.value)
    assert "did you mean width" in str(caught.value)
    assert "bn_eps" in str(caught.value)


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [("shortcut", "C", "A, B"), ("width", "wide", "whole number"), ("bn_eps", "tiny", "number"), ("width", 0, "width")],
)
def test_an_option_of_the_wrong_kind_is_refused_in_words(option: str, value: object, said: str) -> None:
    with pytest.raises(UsageError) as caught:
        build_model("resnet20_cifar", **{option: value})
    assert said in str(caught.value)


def test_a_list_from_a_recipe_serves_as_depths() -> None:
    model = build_model("resnet20_cifar", num_classes=10, depths=[1, 1, 1])
    assert num_parameters(model) == num_parameters(build_model("resnet8_cifar", num_classes=10))


def test_building_leaves_torchs_generator_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    build_model("resnet8_cifar")
    assert torch.equal(torch.rand(4), expected)


def test_initial_values_depend_on_seed_and_name_alone() -> None:
    small = build_model("resnet8_cifar", num_classes=10)
    large = build_model("resnet20_cifar", num_classes=10)
    initialise(small, seed=7)
    initialise(large, seed=7)
    shared = dict(large.named_parameters())
    names = [name for name, p in small.named_parameters() if shared[name].shape == p.shape]
    assert len(names) > 15
    for name in names:
        assert torch.equal(shared[name], dict(small.named_parameters())[name]), name
    before = small.conv1.weight.clone()
    initialise(small, seed=8)
    assert not torch.equal(before, small.conv1.weight)


def test_initial_values_are_the_same_numbers_in_fp64() -> None:
    single, double = build_model("resnet8_cifar"), build_model("resnet8_cifar").double()
    initialise(single, seed=1)
    initialise(double, seed=1)
    for (name, a), b in zip(single.named_parameters(), double.parameters(), strict=True):
        assert torch.equal(a.double(), b), name


@pytest.mark.parametrize(
    ("rule", "expected_std"),
    [("fan_out", (2 / (64 * 9)) ** 0.5), ("fan_in", (2 / (32 * 9)) ** 0.5), ("tf_fan_in", (1 / (32 * 9)) ** 0.5)],
)
def test_convolution_rules_have_their_deviation(rule: str, expected_std: float) -> None:
    model = build_model("resnet20_cifar", conv_init=rule)
    weight = dict(model.named_parameters())["layer3.0.conv1.weight"]
    assert weight.shape == (64, 32, 3, 3)
    assert weight.std().item() == pytest.approx(expected_std, rel=0.02)
    if rule == "tf_fan_in":
        assert weight.abs().max().item() <= 2 * expected_std / 0.8796 + 1e-6


def test_every_network_is_the_fold_of_its_stages() -> None:
    names = [name for name in model_names() if name in {"resnet18", "resnet50", "resnet8_cifar", "resnet20_cifar"}]
    assert len(names) == 4
    for name in names:
        model = build_model(name, num_classes=7).eval()
        assert isinstance(model, Network)
        images = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
        folded = images
        stage_names = [stage for stage, _ in model.stages()]
        assert len(set(stage_names)) == len(stage_names)
        for _, stage in model.stages():
            folded = stage(folded)
        assert torch.equal(folded, model(images)), name
        in_stages = {id(p) for _, stage in model.stages() for p in stage.parameters()}
        assert in_stages == {id(p) for p in model.parameters()}, name
