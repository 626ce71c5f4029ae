"""SGD with a multiple of the learning rate for the biases of norm layers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reconv.core.errors import RecipeError
from reconv.optim import build_optimizer
from reconv.recipe.loader import load
from reconv.recipe.parts.optimizer import OptimizerConfig


def network() -> nn.Module:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 2))
    for parameter in model.parameters():
        nn.init.normal_(parameter)
    return model.double()


def give_gradients(model: nn.Module, step: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(100 * step + number)
        parameter.grad = torch.randn(parameter.shape, dtype=parameter.dtype, generator=generator)


@pytest.mark.parametrize("path", ["foreach", "fused"])
@pytest.mark.parametrize("decay", ["none", "norm-bias"])
def test_five_steps_equal_torch_with_a_parameter_group_for_norm_biases(path: str, decay: str) -> None:
    model, twin = network(), network()
    section = OptimizerConfig(
        momentum=0.85, nesterov=True, weight_decay=0.01, weight_decay_exclude=decay,
        norm_bias_lr_scale=64, implementation=path,  # type: ignore[arg-type]
    )  # fmt: skip
    ours = build_optimizer(section, model)
    named = dict(twin.named_parameters())
    free = {"1.weight", "1.bias", "0.bias", "3.bias"} if decay == "norm-bias" else set()
    groups = [
        {
            "params": [parameter],
            "lr": 0.02 * (64 if name == "1.bias" else 1),
            "weight_decay": 0.0 if name in free else 0.01 / (64 if name == "1.bias" else 1),
        }
        for name, parameter in named.items()
    ]
    theirs = torch.optim.SGD(groups, momentum=0.85, nesterov=True)
    for step in range(5):
        give_gradients(model, step)
        give_gradients(twin, step)
        ours.step(0.02, torch.tensor(True))
        theirs.step()
    assert len(named) == 6
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, named[name], rtol=1e-12, atol=1e-12, msg=name)


def test_the_state_dict_does_not_depend_on_the_lr_scale() -> None:
    plain, fast = (build_optimizer(OptimizerConfig(norm_bias_lr_scale=scale), network()) for scale in (1, 64))
    assert plain.state_dict().keys() == fast.state_dict().keys()
    assert len(plain.grads()) == 0


def test_a_step_that_is_not_ok_changes_no_norm_bias() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(model, 0)
    build_optimizer(OptimizerConfig(norm_bias_lr_scale=64), model).step(0.1, torch.tensor(False))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_only_sgd_has_an_lr_scale_for_norm_biases() -> None:
    with pytest.raises(RecipeError, match="norm_bias_lr"):
        load("quickstart", [("optimizer.name", "lars", "--set"), ("optimizer.norm_bias_lr_scale", "64", "--set")])
