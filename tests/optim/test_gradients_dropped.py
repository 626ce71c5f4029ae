"""Gradients are dropped between steps, not filled with zeros."""

from __future__ import annotations

import pytest
import torch

from reconv.models import build_model
from reconv.optim import build_optimizer
from reconv.recipe.schema import OptimizerConfig


@pytest.mark.parametrize("kind", ["sgd", "lars", "rmsprop", "rmsprop-tf"])
def test_no_parameter_keeps_memory_for_its_gradient_between_steps(kind: str) -> None:
    model = build_model("resnet8_cifar", num_classes=10)
    optimizer = build_optimizer(OptimizerConfig.model_validate({"name": kind}), model)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
