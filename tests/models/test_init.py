"""Initialization of the last layer, and of norms whose weight is initialized to zero."""

from __future__ import annotations

import math

import pytest
from torch import nn

from reconv.models import build_model
from reconv.models.efficientnet import MBConv
from reconv.models.mobilenet import InvertedResidual

# Bound of the values and their deviation, by inputs and outputs of the layer: resnet20_cifar has 64 inputs.
INPUTS, OUTPUTS = 64, 500
UNIFORM = {
    "torch": 1 / math.sqrt(INPUTS),
    "uniform_out": 1 / math.sqrt(OUTPUTS),
    "glorot": math.sqrt(6 / (INPUTS + OUTPUTS)),
}


@pytest.mark.parametrize("rule", [*UNIFORM, "normal", "truncated"])
def test_linear_init_schemes_have_the_expected_bound_and_std(rule: str) -> None:
    layer = build_model("resnet20_cifar", num_classes=OUTPUTS, linear_init=rule).fc
    largest, deviation = layer.weight.abs().max().item(), layer.weight.std().item()
    if rule in UNIFORM:
        assert 0.99 * UNIFORM[rule] < largest <= UNIFORM[rule]
        assert deviation == pytest.approx(UNIFORM[rule] / math.sqrt(3), rel=0.02)
    elif rule == "normal":
        assert deviation == pytest.approx(0.01, rel=0.02)
        assert 0.03 < largest < 0.06
    else:  # a normal cut at two deviations is narrower than the normal
        assert deviation == pytest.approx(0.01 * 0.8796, rel=0.02)
        assert largest <= 0.02
    assert bool(layer.bias.any()) == (rule == "torch")


@pytest.mark.parametrize("name,block", [("mobilenet_v2", InvertedResidual), ("efficientnet_b0", MBConv)])
@pytest.mark.parametrize("rule", ["never", "always", "no-projection"])
def test_zero_gamma_zeroes_the_last_norms_of_the_chosen_blocks(name: str, block: type[nn.Module], rule: str) -> None:
    model = build_model(name, num_classes=10, zero_gamma=rule)
    blocks = [module for module in model.modules() if isinstance(module, MBConv | InvertedResidual)]
    assert all(isinstance(module, block) for module in blocks)
    assert {module.has_shortcut for module in blocks} == {True, False}
    for module in blocks:
        gamma = module.get_submodule(module.last_norm).weight
        is_zero = rule == "always" or (rule == "no-projection" and module.has_shortcut)
        assert bool((gamma == (0 if is_zero else 1)).all())
