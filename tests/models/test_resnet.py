from __future__ import annotations

import pytest
import torch

from reconv.models import build_model


@pytest.mark.parametrize(
    ("name", "num_classes", "published"),
    [
        ("resnet18", 1000, 11_689_512),
        ("resnet34", 1000, 21_797_672),
        ("resnet50", 1000, 25_557_032),
        ("resnet101", 1000, 44_549_160),
        ("resnet152", 1000, 60_192_808),
        ("resnet20_cifar", 10, 269_722),
    ],
)
def test_parameter_counts_are_the_published_ones(name: str, num_classes: int, published: int) -> None:
    assert sum(p.numel() for p in build_model(name, num_classes).parameters()) == published


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


def test_resnet50_strides_in_the_three_by_three() -> None:
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


@pytest.mark.parametrize(("rule", "num_zero"), [("never", 0), ("always", 9), ("no-projection", 7)])
def test_zero_gamma_rules_name_the_right_blocks(rule: str, num_zero: int) -> None:
    model = build_model("resnet20_cifar", shortcut="B", zero_gamma=rule)
    zeros = [name for name, p in model.named_parameters() if name.endswith("bn2.weight") and p.abs().sum() == 0]
    assert len(zeros) == num_zero
    others = [p for name, p in model.named_parameters() if "bn1.weight" in name]
    assert others and all(torch.equal(p, torch.ones_like(p)) for p in others)


def test_a_grey_network_of_another_width_runs() -> None:
    model = build_model("resnet8_cifar", num_classes=10, in_channels=1, width=8).eval()
    assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
