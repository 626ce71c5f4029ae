from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.models import build_model, model_names
from reconv.models.layers.batch_norm import LayerState


def test_resnet18_has_torchvisions_keys_and_shapes() -> None:
    state = build_model("resnet18").state_dict()
    norm = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    expected = {"conv1.weight", "fc.weight", "fc.bias", *(f"bn1.{n}" for n in norm)}
    for layer in range(1, 5):
        for block in range(2):
            at = f"layer{layer}.{block}"
            for index in (1, 2):
                expected |= {f"{at}.conv{index}.weight", *(f"{at}.bn{index}.{n}" for n in norm)}
            if layer > 1 and block == 0:
                expected |= {f"{at}.downsample.0.weight", *(f"{at}.downsample.1.{n}" for n in norm)}
    assert set(state) == expected
    assert len(expected) == 122
    assert state["conv1.weight"].shape == (64, 3, 7, 7)
    assert state["layer4.0.downsample.0.weight"].shape == (512, 256, 1, 1)


def test_resnet50_has_its_strides_in_the_3x3() -> None:
    model = build_model("resnet50")
    block = model.get_submodule("layer2.0")
    assert block.conv1.stride == (1, 1)
    assert block.conv2.stride == (2, 2)
    assert set(dict(block.named_children())) >= {"conv1", "bn1", "conv2", "bn2", "conv3", "bn3", "downsample"}
    assert len(model.state_dict()) == 320


def test_shortcut_a_has_no_parameters_and_keeps_every_channel() -> None:
    model = build_model("resnet20_cifar", num_classes=10)
    shortcut = model.get_submodule("layer2.0.downsample")
    images = torch.arange(16 * 4 * 4, dtype=torch.float32).view(1, 16, 4, 4)
    padded = shortcut(images)
    assert padded.shape == (1, 32, 2, 2)
    assert torch.equal(padded[:, 8:24], images[:, :, ::2, ::2])
    assert padded[:, :8].abs().sum() == 0 and padded[:, 24:].abs().sum() == 0
    assert list(shortcut.parameters()) == []
    with_projection = build_model("resnet20_cifar", num_classes=10, shortcut="B")
    assert sum(p.numel() for p in with_projection.parameters()) == 269_722 + (16 * 32 + 64) + (32 * 64 + 128)


@pytest.mark.parametrize(
    ("name", "last", "rule", "num_zero"),
    [
        ("resnet20_cifar", "bn2", "never", 0),
        ("resnet20_cifar", "bn2", "always", 9),
        ("resnet20_cifar", "bn2", "no-projection", 0),  # the rule is for bottlenecks
        ("resnet29_bottleneck_cifar", "bn3", "never", 0),
        ("resnet29_bottleneck_cifar", "bn3", "always", 9),
        ("resnet29_bottleneck_cifar", "bn3", "no-projection", 6),
    ],
)
def test_zero_gamma_selects_the_right_blocks(name: str, last: str, rule: str, num_zero: int) -> None:
    model = build_model(name, shortcut="B", zero_gamma=rule)
    zeros = [n for n, p in model.named_parameters() if n.endswith(f"{last}.weight") and p.abs().sum() == 0]
    assert len(zeros) == num_zero
    others = [p for n, p in model.named_parameters() if "bn1.weight" in n]
    assert others and all(torch.equal(p, torch.ones_like(p)) for p in others)


def test_grayscale_input_and_another_width() -> None:
    model = build_model("resnet8_cifar", num_classes=10, in_channels=1, width=8).eval()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def brute_force_cifar(model: nn.Module, x: Tensor) -> Tensor:
    """The 6n+2 network of the paper at evaluation, written from its description over the state dictionary."""
    state = model.state_dict()

    def conv_bn(x: Tensor, conv: str, bn: str, stride: int) -> Tensor:
        y = F.conv2d(x, state[f"{conv}.weight"], stride=stride, padding=1)
        scale = state[f"{bn}.weight"] / (state[f"{bn}.running_var"] + 1e-5).sqrt()
        shift = state[f"{bn}.bias"] - state[f"{bn}.running_mean"] * scale
        return y * scale[:, None, None] + shift[:, None, None]

    x = conv_bn(x, "conv1", "bn1", 1).relu()
    for layer in (1, 2, 3):
        for block in range(3):
            at, stride = f"layer{layer}.{block}", 2 if layer > 1 and block == 0 else 1
            y = conv_bn(x, f"{at}.conv1", f"{at}.bn1", stride).relu()
            y = conv_bn(y, f"{at}.conv2", f"{at}.bn2", 1)
            if stride == 2:
                kept, shortcut = x[:, :, ::2, ::2], torch.zeros_like(y)
                start = (y.shape[1] - kept.shape[1]) // 2
                shortcut[:, start : start + kept.shape[1]] = kept
                x = shortcut
            x = (x + y).relu()
    return x.mean((2, 3)) @ state["fc.weight"].T + state["fc.bias"]


def test_resnet20_is_the_papers_network() -> None:
    model = build_model("resnet20_cifar", num_classes=10).double()
    generator = torch.Generator().manual_seed(0)
    for name, tensor in model.state_dict().items():
        if "bn" in name and tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=generator) + 0.5)
    x = torch.randn(2, 3, 32, 32, generator=generator).double()
    torch.testing.assert_close(model.eval()(x), brute_force_cifar(model, x), rtol=1e-10, atol=1e-10)


def test_depth_56_is_the_basic_variant_unless_named_bottleneck() -> None:
    basic, bottleneck = build_model("resnet56_cifar"), build_model("resnet56_bottleneck_cifar")
    assert basic.spec.block == "basic" and basic.spec.depths == (9, 9, 9)
    assert bottleneck.spec.block == "bottleneck" and bottleneck.spec.depths == (6, 6, 6)
    assert "resnet29_cifar" not in model_names()


def test_wide_cifar_resnext_is_wider() -> None:
    narrow, wide = build_model("resnext29_cifar"), build_model("resnext29_wide_cifar")
    assert narrow.get_submodule("layer1.0.conv2").weight.shape == (32, 1, 3, 3)
    assert wide.get_submodule("layer1.0.conv2").weight.shape == (128, 4, 3, 3)
    assert wide.eval()(torch.zeros(1, 3, 32, 32)).shape == (1, 1000)


def test_project_first_adds_a_projection_to_the_first_stage_only_where_there_was_none() -> None:
    assert build_model("resnet10").get_submodule("layer1.0").downsample is None
    model = build_model("resnet18", project_first=True)
    assert model.get_submodule("layer1.0").downsample is not None
    assert model.get_submodule("layer1.1").downsample is None


def test_squeeze_excitation_width_is_absolute_or_a_ratio() -> None:
    absolute = build_model("resnet14", se_units=16)
    ratio = build_model("resnet14", se_ratio=16)
    assert absolute.get_submodule("layer4.0.se.fc1").weight.shape == (16, 2048, 1, 1)
    assert ratio.get_submodule("layer4.0.se.fc1").weight.shape == (128, 2048, 1, 1)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("resnet18", {"groups": 32}, "bottleneck"),
        ("resnet50", {"version": "v2", "zero_gamma": "always"}, "v2"),
        ("resnet50", {"se_units": 16, "se_ratio": 16}, "one of them"),
        ("resnet50", {"depths": []}, "depths"),
    ],
)
def test_contradictory_options_are_rejected(name: str, options: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        build_model(name, **options)


@pytest.mark.parametrize("version", ["v1.5", "v2"])
@pytest.mark.parametrize("block", ["basic", "bottleneck"])
def test_stochastic_depth_drops_branches_of_samples_more_often_in_later_blocks(version: str, block: str) -> None:
    options = {"block": block, "version": version, "depths": [2, 2], "width": 8}
    plain = build_model("resnet10", num_classes=5, **options)
    model = build_model("resnet10", num_classes=5, drop_path_rate=0.6, **options)
    assert list(model.state_dict()) == list(plain.state_dict())
    blocks = [child for stage in (model.layer1, model.layer2) for child in stage]
    assert [getattr(child.drop_path, "rate", 0.0) for child in blocks] == pytest.approx([0.0, 0.2, 0.4, 0.6])
    x = torch.rand(200, 16 if block == "basic" else 64, 2, 2)
    last = blocks[-1].train()
    LayerState(model, seed=1).set_micro_batch(Batch({}, torch.arange(200), (200,)), step=0)
    inner = last(x)
    shortcut = x.relu() if version != "v2" else x
    is_dropped = torch.isclose(inner, shortcut).flatten(1).all(dim=1)
    assert 0.5 < is_dropped.float().mean() < 0.7
    assert torch.equal(
        model.eval()(torch.ones(2, 3, 32, 32)), _with_weights(plain, model).eval()(torch.ones(2, 3, 32, 32))
    )


def _with_weights(model: nn.Module, other: nn.Module) -> nn.Module:
    model.load_state_dict(other.state_dict())
    return model
