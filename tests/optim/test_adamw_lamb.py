"""AdamW against torch's own, LAMB against a loop written from its formula, and what their step counters count."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reconv.optim import LAMB, AdamW, HalfPrecisionOptimizer, Rounding, build_optimizer, decay_groups
from reconv.recipe.parts.optimizer import OptimizerConfig

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)
NUM_STEPS = 20
BETAS, EPSILON, DECAY = (0.8, 0.95), 1e-3, 0.05
DECAYED = ("0.weight", "3.weight")


def network() -> nn.Module:
    """Two layers and a norm in fp64; one weight starts at zero, so that a norm of zero is met."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)).double()
    nn.init.zeros_(model[3].weight)
    return model.to(memory_format=torch.channels_last)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator, dtype=torch.float64))


def lr_at(step: int) -> float:
    return 0.3 / (1 + step)


def assert_equal(model: nn.Module, expected: dict[str, Tensor], tolerance: float = 1e-12) -> None:
    assert len(expected) == 6
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.detach(), expected[name].detach(), rtol=tolerance, atol=tolerance, msg=name)


def torch_adamw(model: nn.Module) -> torch.optim.AdamW:
    named = dict(model.named_parameters())
    groups = [
        {"params": [named[name] for name in DECAYED], "weight_decay": DECAY},
        {"params": [p for name, p in named.items() if name not in DECAYED], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=BETAS, eps=EPSILON)


@pytest.mark.parametrize("scalar", [float, lambda lr: torch.tensor(lr, dtype=torch.float64)], ids=["float", "tensor"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_adamw_equals_torchs_and_skipped_steps_do_not_count(implementation: Any, scalar: Any) -> None:
    model, twin = network(), network()
    groups = decay_groups(model, "norm-bias")
    ours = AdamW(groups, betas=BETAS, epsilon=EPSILON, weight_decay=DECAY, implementation=implementation)
    theirs = torch_adamw(twin)
    for step in range(NUM_STEPS):
        if step in (0, 7):
            give_gradients(model, 1000)
            ours.step(scalar(0.5), NOT_OK)
        give_gradients(model, step)
        give_gradients(twin, step)
        ours.step(scalar(lr_at(step)), OK)
        for group in theirs.param_groups:
            group["lr"] = lr_at(step)
        theirs.step()
    assert_equal(model, dict(twin.named_parameters()))
    state = ours.state_dict()
    for name, p in twin.named_parameters():
        for kind, expected in theirs.state[p].items():
            torch.testing.assert_close(state[f"{kind}.{name}"], expected, rtol=1e-12, atol=1e-12, msg=f"{kind}.{name}")
    assert len(state) == 3 * 6


def lamb_by_hand(w: Tensor, g: Tensor, m: Tensor, v: Tensor, t: int, lr: float, decay: float) -> None:
    """One step as in timm's Lamb without max_grad_norm, in place."""
    beta1, beta2 = BETAS
    m.mul_(beta1).add_(g, alpha=1 - beta1)
    v.mul_(beta2).addcmul_(g, g, value=1 - beta2)
    update = (m / (1 - beta1**t)) / (v.sqrt() / math.sqrt(1 - beta2**t) + EPSILON)
    if decay:
        update = update + decay * w
        w_norm, u_norm = float(w.norm()), float(update.norm())
        update = update * (w_norm / u_norm if w_norm > 0 and u_norm > 0 else 1.0)
    w.sub_(lr * update)


@pytest.mark.parametrize("weight_decay", [0.0, DECAY])
def test_lamb_equals_a_loop_written_from_its_formula(weight_decay: float) -> None:
    model = network()
    lamb = LAMB(decay_groups(model, "norm-bias"), betas=BETAS, epsilon=EPSILON, weight_decay=weight_decay)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    moments = {name: (torch.zeros_like(w), torch.zeros_like(w)) for name, w in weights.items()}
    for step in range(NUM_STEPS):
        if step in (0, 7):
            give_gradients(model, 1000)
            lamb.step(0.5, NOT_OK)
        give_gradients(model, step)
        for name, p in model.named_parameters():
            assert p.grad is not None
            decay = weight_decay if name in DECAYED else 0.0
            lamb_by_hand(weights[name], p.grad.clone(), *moments[name], step + 1, lr_at(step), decay)
        lamb.step(lr_at(step) if step % 2 else torch.tensor(lr_at(step), dtype=torch.float64), OK)
    assert_equal(model, weights)


@pytest.mark.parametrize("name", ["adamw", "lamb"])
@pytest.mark.parametrize("implementation", ["foreach", "auto"])
def test_a_parameter_with_a_late_first_gradient_starts_its_own_count(name: str, implementation: str) -> None:
    """Otherwise its first updates would be sqrt(1 - beta2) / (1 - beta1) times too large or small."""
    late, fresh = network(), network()
    section = OptimizerConfig.model_validate({"name": name, "weight_decay": 0.0, "implementation": implementation})
    optimizer = build_optimizer(section, late)
    for step in range(5):
        give_gradients(late, step)
        late[3].weight.grad = None
        optimizer.step(0.1, OK)
    other = build_optimizer(section, fresh)
    for model, each in ((late, optimizer), (fresh, other)):
        give_gradients(model, 9)
        each.step(0.1, OK)
    assert float(optimizer.state_dict()["step.3.weight"]) == 1 and float(optimizer.state_dict()["step.3.bias"]) == 6
    assert torch.equal(late[3].weight, fresh[3].weight)
    assert not torch.equal(late[0].weight, fresh[0].weight)


@pytest.mark.parametrize(("name", "expected"), [("adamw", 1e-8), ("lamb", 1e-6), ("rmsprop", 1e-3), ("lars", 0.0)])
def test_eps_is_the_usual_one_of_the_optimizer(name: str, expected: float) -> None:
    assert OptimizerConfig.model_validate({"name": name}).effective_eps == expected


@pytest.mark.parametrize("name", ["adamw", "lamb"])
def test_state_of_half_precision_weights_is_float32(name: str) -> None:
    model = network().half()
    section = OptimizerConfig.model_validate({"name": name})
    optimizer = build_optimizer(section, model, rounding=Rounding(is_stochastic=True))
    assert isinstance(optimizer, HalfPrecisionOptimizer)
    before = copy.deepcopy(model.state_dict())
    give_gradients(model, 0)
    optimizer.step(0.1, OK)
    state = optimizer.state_dict()
    assert {t.dtype for kind, t in state.items() if kind != "rounding.step"} == {torch.float32}
    assert float(state["step.0.weight"]) == 1
    assert not torch.equal(model[0].weight, before["0.weight"])
