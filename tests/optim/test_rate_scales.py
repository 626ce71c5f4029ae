"""Learning rates by layer, of the backbone and of norm biases, for every optimizer."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from reconv.models import build_model
from reconv.optim import describe_rate_scales, rate_scales
from reconv.optim.factory import build_optimizer
from reconv.recipe.parts.optimizer import OptimizerConfig

OK = torch.tensor(True)
KINDS: dict[str, dict[str, Any]] = {
    "sgd": {"name": "sgd", "nesterov": True},
    "sgd-foreach": {"name": "sgd", "implementation": "foreach"},
    "lars": {"name": "lars"},
    "rmsprop": {"name": "rmsprop"},
    "rmsprop-tf": {"name": "rmsprop-tf"},
    "adamw": {"name": "adamw"},
    "adamw-foreach": {"name": "adamw", "implementation": "foreach"},
    "lamb": {"name": "lamb"},
}
RATES = {"layer_decay": 0.5, "backbone_lr_scale": 0.25}
DECAY = {"weight_decay": 0.1, "weight_decay_exclude": "norm-bias"}


def section_of(kind: str, **given: Any) -> OptimizerConfig:
    decay = {"weight_decay": 0.1} if kind == "lars" else DECAY
    return OptimizerConfig.model_validate({**KINDS[kind], **decay, **given})


def network() -> nn.Module:
    torch.manual_seed(0)
    return build_model("resnet8_cifar", num_classes=10).double()


def train(model: nn.Module, section: OptimizerConfig, lr: float, **options: Any) -> dict[str, torch.Tensor]:
    """The parameters after three steps with the same gradients, which do not depend on the weights."""
    optimizer = build_optimizer(section, model, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=generator, dtype=p.dtype)
        optimizer.step(lr / (1 + step), OK)
    return {name: p.detach().clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("kind", KINDS)
def test_each_layer_is_trained_as_with_its_own_learning_rate(kind: str) -> None:
    model = network()
    scales = {name: scale.lr for name, scale in rate_scales(section_of(kind, **RATES), model).items()}
    assert len(scales) == len(list(model.parameters()))
    assert sorted(set(scales.values())) == [0.25 / 16, 0.25 / 8, 0.25 / 4, 0.25 / 2, 1]
    found = train(copy.deepcopy(model), section_of(kind, **RATES), 0.1)
    for scale in set(scales.values()):
        expected = train(copy.deepcopy(model), section_of(kind), 0.1 * scale)
        for name in [name for name, own in scales.items() if own == scale]:
            torch.testing.assert_close(found[name], expected[name], rtol=1e-12, atol=1e-12, msg=name)
    assert not torch.equal(found["conv1.weight"], train(model, section_of(kind), 0.1)["conv1.weight"])


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lamb"])
def test_a_shard_has_the_rates_of_the_whole_network(kind: str) -> None:
    model = network()
    whole = train(copy.deepcopy(model), section_of(kind, **RATES), 0.1)
    names = ["conv1.weight", "layer2.0.bn1.bias", "fc.weight"]
    shard = train(copy.deepcopy(model), section_of(kind, **RATES), 0.1, only=names)
    assert all(torch.equal(shard[name], whole[name]) for name in names)
    assert torch.equal(shard["fc.bias"], dict(model.named_parameters())["fc.bias"])


def test_only_norm_biases_keep_learning_rate_times_weight_decay() -> None:
    scales = rate_scales(section_of("sgd", layer_decay=0.5, norm_bias_lr_scale=64), network())
    assert (scales["fc.weight"].lr, scales["fc.weight"].decay_divisor) == (1, 1)
    assert (scales["layer3.0.conv1.weight"].lr, scales["layer3.0.conv1.weight"].decay_divisor) == (0.5, 1)
    assert (scales["layer3.0.bn1.bias"].lr, scales["layer3.0.bn1.bias"].decay_divisor) == (32, 64)


def test_the_range_of_rates_is_described() -> None:
    assert rate_scales(OptimizerConfig(), network()) == {}
    scales = rate_scales(section_of("adamw", backbone_lr_scale=0.1), network())
    assert describe_rate_scales(scales) == "learning rates: x 0.1 (conv1.weight) to x 1 (fc.weight)"
