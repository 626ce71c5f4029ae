"""The zero-gamma rule in networks whose blocks have a shortcut or none, and never a projection."""

from __future__ import annotations

import pytest
from torch import nn

from reconv.models import build_model
from reconv.models.efficientnet import MBConv
from reconv.models.mobilenet import InvertedResidual


@pytest.mark.parametrize("name,block", [("mobilenet_v2", InvertedResidual), ("efficientnet_b0", MBConv)])
@pytest.mark.parametrize("rule", ["never", "always", "no-projection"])
def test_the_last_norms_that_the_rule_names_start_at_zero(name: str, block: type[nn.Module], rule: str) -> None:
    model = build_model(name, num_classes=10, zero_gamma=rule)
    blocks = [module for module in model.modules() if isinstance(module, MBConv | InvertedResidual)]
    assert all(isinstance(module, block) for module in blocks)
    assert {module.has_shortcut for module in blocks} == {True, False}
    for module in blocks:
        gamma = module.get_submodule(module.last_norm).weight
        is_zero = rule == "always" or (rule == "no-projection" and module.has_shortcut)
        assert bool((gamma == (0 if is_zero else 1)).all())
