"""Norm biases at a multiple of the rate: plain loops agree, decay is as fast, state and saving do not change."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from reconv.errors import RecipeError
from reconv.optim import build_optimizer, norm_biases
from reconv.recipe.loader import load
from reconv.recipe.schema import OptimizerConfig


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


def test_the_biases_of_norms_and_nothing_else_are_named() -> None:
    assert norm_biases(network()) == ["1.bias"]
    assert norm_biases(nn.BatchNorm2d(3)) == ["bias"]
    assert norm_biases(nn.Sequential(nn.BatchNorm2d(3, affine=False))) == []


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


def test_the_saved_state_does_not_depend_on_the_rate() -> None:
    plain, fast = (build_optimizer(OptimizerConfig(norm_bias_lr_scale=rate), network()) for rate in (1, 64))
    assert plain.state_dict().keys() == fast.state_dict().keys()
    assert len(plain.grads()) == 0


def test_a_step_that_is_not_ok_moves_no_norm_bias() -> None:
    model = network()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    give_gradients(model, 0)
    build_optimizer(OptimizerConfig(norm_bias_lr_scale=64), model).step(0.1, torch.tensor(False))
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_only_sgd_has_a_rate_of_its_own_for_norm_biases() -> None:
    with pytest.raises(RecipeError, match="norm_bias_lr"):
        load("quickstart", [("optimizer.name", "lars", "--set"), ("optimizer.norm_bias_lr_scale", "64", "--set")])
