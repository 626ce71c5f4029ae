from __future__ import annotations

import pytest
import torch

from reconv.models import model_names, model_spec

PUBLISHED = {
    "resnet18": 11_689_512,
    "resnet26": 15_995_176,
    "resnet34": 21_797_672,
    "resnet50": 25_557_032,
    "resnet101": 44_549_160,
    "resnet152": 60_192_808,
    "resnet200": 64_673_832,
    "resnext14_32x4d": 9_411_880,
    "resnext50_32x4d": 25_028_904,
    "resnext101_32x4d": 44_177_704,
    "resnext101_32x8d": 88_791_336,
    "wide_resnet50_2": 68_883_240,
    "wide_resnet101_2": 126_886_696,
    "mobilenet_v2": 3_504_872,
    "googlenet": 13_004_888,
    "efficientnet_b0": 5_288_548,
    "efficientnet_b1": 7_794_184,
    "efficientnet_b2": 9_109_994,
    "efficientnet_b3": 12_233_232,
    "efficientnet_b4": 19_341_616,
    "efficientnet_b5": 30_389_784,
    "efficientnet_b6": 43_040_704,
    "efficientnet_b7": 66_347_960,
}
# 6n+2 with 10 classes: 0.27M, 0.46M, 0.66M, 0.85M and 1.7M in the paper.
PUBLISHED_CIFAR = {
    "resnet20_cifar": 269_722,
    "resnet32_cifar": 464_154,
    "resnet44_cifar": 658_586,
    "resnet56_cifar": 853_018,
    "resnet110_cifar": 1_727_962,
}
PUBLISHED_VARIANTS = [
    ("efficientnet_b4", {"group_dim": 16, "expand_ratio": 4}, 19_328_168),
    ("googlenet", {"aux_heads": False}, 6_624_904),
    ("resnet50", {"version": "v2"}, 25_549_352),
    ("resnet18", {"version": "v2"}, 11_687_720),
    ("resnet50", {"stem": "deep"}, 25_576_264),
    ("resnet50", {"norm": "group"}, 25_557_032),
    ("se_resnext101_32x4d", {"se_units": 0, "se_ratio": 16}, 48_955_416),
    ("resnet50", {"num_classes": 1001}, 25_557_032 + 2049),
]


def count(name: str, num_classes: int = 1000, **options: object) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model_spec(name, num_classes, **options).build().parameters())


@pytest.mark.parametrize("name", PUBLISHED)
def test_parameter_counts_are_the_published_ones(name: str) -> None:
    assert count(name) == PUBLISHED[name]


@pytest.mark.parametrize("name", PUBLISHED_CIFAR)
def test_cifar_parameter_counts_are_the_published_ones(name: str) -> None:
    assert count(name, 10) == PUBLISHED_CIFAR[name]


@pytest.mark.parametrize(("name", "options", "published"), PUBLISHED_VARIANTS)
def test_variants_have_the_expected_parameter_counts(name: str, options: dict[str, int], published: int) -> None:
    assert count(name, **options) == published


def test_every_model_name_has_a_spec_and_builds() -> None:
    names = model_names()
    assert len(names) == len(set(names)) >= 49
    assert all(count(name, 10) > 50_000 for name in names)


def test_every_network_accepts_every_common_option() -> None:
    options = {"norm": "group", "norm_groups": 4, "padding": "same", "conv_init": "tf_fan_in", "linear_init": "glorot"}
    taken = [name for name in model_names() if count(name, 1001, **options, norm_eps=1e-3)]
    assert taken == model_names()
