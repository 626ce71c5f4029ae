"""Which parameters get weight decay."""

from __future__ import annotations

import pytest
from torch import nn

from reconv.core.errors import UsageError
from reconv.models import build_model
from reconv.optim import decay_groups, norm_biases


@pytest.mark.parametrize(("exclude", "num_excluded"), [("none", 0), ("norm-bias", 2 * 9 + 1), ("norm", 2 * 9)])
def test_excluded_parameters_go_by_module_type(exclude: str, num_excluded: int) -> None:
    model = build_model("resnet8_cifar", num_classes=10, shortcut="B")
    groups = decay_groups(model, exclude)
    assert len(groups.no_decay) == num_excluded
    assert len(groups.no_decay) + len(groups.decay) == len(list(model.parameters()))
    if exclude != "none":
        assert "layer2.0.downsample.1.weight" in groups.no_decay  # a norm whose name does not say so
        assert ("fc.bias" in groups.no_decay) == (exclude == "norm-bias")


def test_nvidia_by_name_decays_shortcut_norms_and_the_last_bias() -> None:
    model = build_model("resnet8_cifar", num_classes=10, shortcut="B")
    groups = decay_groups(model, "nvidia-by-name")
    excluded, decayed = groups.no_decay, groups.decay
    assert sorted(excluded) == sorted(name for name, _ in model.named_parameters() if "bn" in name)
    assert len(excluded) == 2 * 7
    assert {"layer2.0.downsample.1.weight", "layer2.0.downsample.1.bias", "fc.bias", "conv1.weight"} <= decayed.keys()
    assert len(excluded) + len(decayed) == len(list(model.parameters()))


@pytest.mark.parametrize("name", ["efficientnet_cifar", "mobilenet_v2"])
def test_nvidia_by_name_is_rejected_for_models_with_other_names(name: str) -> None:
    model = build_model(name, num_classes=10)
    with pytest.raises(UsageError, match="matches no norm") as exc_info:
        decay_groups(model, "nvidia-by-name")
    assert "optimizer.weight_decay_exclude=norm" in exc_info.value.hint
    assert len(decay_groups(model, "norm").no_decay) > 50


def test_norm_biases_are_the_biases_of_norm_layers() -> None:
    assert norm_biases(nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3))) == ["1.bias"]
    assert norm_biases(nn.BatchNorm2d(3)) == ["bias"]
    assert norm_biases(nn.Sequential(nn.BatchNorm2d(3, affine=False))) == []
