"""The optimizers for anybody's loop give the bits of the trainer's, and are torch's to whoever uses them."""

from __future__ import annotations

import copy
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR

from reconv.core.errors import UsageError
from reconv.optim import EMA, LAMB, LARS, FusedLAMB, FusedLARS, FusedRMSpropTF, RMSprop, decay_groups

DECAY = 0.05
OK = torch.tensor(True)
OPTIMIZERS: dict[str, tuple[Any, Any, dict[str, Any], dict[str, Any]]] = {  # ours, the trainer's, options of each
    "lars": (
        FusedLARS,
        LARS,
        {"momentum": 0.8, "nesterov": True, "trust_coefficient": 0.02, "eps": 1e-3},
        {"momentum": 0.8, "nesterov": True, "trust_coefficient": 0.02, "epsilon": 1e-3},
    ),
    "lamb": (FusedLAMB, LAMB, {"betas": (0.8, 0.95), "eps": 1e-3}, {"betas": (0.8, 0.95), "epsilon": 1e-3}),
    "rmsprop": (
        FusedRMSpropTF,
        RMSprop,
        {"alpha": 0.8, "eps": 1e-3, "momentum": 0.7},
        {"form": "tensorflow", "alpha": 0.8, "epsilon": 1e-3, "momentum": 0.7},
    ),
}


def network() -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(4, 3))
    return model.to(memory_format=torch.channels_last)  # type: ignore[call-overload, no-any-return]


def groups(model: nn.Module) -> list[dict[str, Any]]:
    split = decay_groups(model, "norm-bias")
    return [
        {"params": list(split.decay.values()), "weight_decay": DECAY},
        {"params": list(split.no_decay.values()), "weight_decay": 0.0},
    ]


def loss_of(model: nn.Module, step: int) -> Tensor:
    images = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(step))
    loss: Tensor = model(images).square().sum()
    return loss


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> list[Tensor]:
    for step in steps:
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_steps_give_the_bits_of_the_trainers(name: str) -> None:
    ours, trainers, options, theirs = OPTIMIZERS[name]
    model, twin = network(), network()
    start = [p.detach().clone() for p in model.parameters()]
    optimizer, expected = (
        ours(groups(model), lr=0.1, **options),
        trainers(decay_groups(twin, "norm-bias"), weight_decay=DECAY, **theirs),
    )
    schedule = StepLR(optimizer, 2, gamma=0.5)
    for step in range(5):
        optimizer.zero_grad()
        expected.zero_grad()
        loss_of(model, step).backward()
        loss_of(twin, step).backward()
        expected.step(schedule.get_last_lr()[0], OK)
        optimizer.step()
        schedule.step()
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(model.parameters(), start, strict=True))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_loaded_state_continues_the_steps(name: str) -> None:
    ours, _, options, _ = OPTIMIZERS[name]
    whole, first, second = network(), network(), network()
    expected = train(whole, ours(groups(whole), lr=0.1, **options), range(5))
    optimizer = ours(groups(first), lr=0.1, **options)
    train(first, optimizer, range(3))
    file = io.BytesIO()
    torch.save({"model": first.state_dict(), "optimizer": optimizer.state_dict()}, file)
    saved = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    second.load_state_dict(saved["model"])
    resumed = ours(groups(second), lr=1.0, **options)
    resumed.load_state_dict(saved["optimizer"])
    found = train(second, resumed, range(3, 5))
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_gradient_scaler_skips_steps_that_overflow_and_closures_are_called() -> None:
    model = network()
    optimizer, scaler = FusedLAMB(model.parameters(), lr=0.1), torch.amp.GradScaler("cpu", init_scale=4.0)
    before = [p.detach().clone() for p in model.parameters()]
    for factor in (float("inf"), 1.0):
        optimizer.zero_grad()
        scaler.scale(loss_of(model, 0) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        changed = [not torch.equal(a, b) for a, b in zip(model.parameters(), before, strict=True)]
        assert all(changed) if factor == 1.0 else not any(changed)

    def closure() -> Tensor:
        loss = loss_of(model, 1)
        loss.backward()
        return loss

    optimizer.zero_grad()
    assert isinstance(optimizer.step(closure), Tensor)


def test_parameters_without_a_gradient_stay_and_later_ones_start_late() -> None:
    model = network()
    optimizer = FusedLAMB([model[0].weight], lr=0.1)
    optimizer.add_param_group({"params": [model[4].weight]})
    frozen = model[4].weight.detach().clone()
    model[4].weight.requires_grad_(False)
    train(model, optimizer, range(2))
    assert torch.equal(model[4].weight, frozen) and model[4].weight not in optimizer.state
    model[4].weight.requires_grad_(True)
    train(model, optimizer, range(2, 3))
    assert [float(optimizer.state[p]["step"]) for p in (model[0].weight, model[4].weight)] == [3, 1]


def test_what_cannot_be_updated_is_refused() -> None:
    embedding = nn.Embedding(4, 2, sparse=True)
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(UsageError, match="sparse"):
        FusedLARS(embedding.parameters(), lr=0.1).step()
    for wrong in ({"lr": -1.0}, {"lr": 1.0, "weight_decay": float("nan")}):
        with pytest.raises(ValueError, match="is not a number from 0 on"):
            FusedLARS(network().parameters(), **wrong)


def test_the_average_is_that_of_the_formula_and_is_loaded() -> None:
    model = network()
    optimizer, ema = torch.optim.SGD(model.parameters(), lr=0.1), EMA(model, 0.3)
    average = model[0].weight.detach().double()
    for step in range(4):
        train(model, optimizer, range(step, step + 1))
        ema.update()
        decay = min(0.3, (1 + step) / (10 + step))
        average = decay * average + (1 - decay) * model[0].weight.detach().double()
    torch.testing.assert_close(ema.model.get_parameter("0.weight").double(), average, rtol=1e-6, atol=1e-7)
    assert not ema.model.training and ema.model.get_buffer("1.num_batches_tracked") == 4
    again = EMA(copy.deepcopy(model), 0.3)
    again.load_state_dict(ema.state_dict())
    for one in (ema, again):  # the models are equal, and the fifth update has the weight of a fifth one
        one.update()
    assert all(torch.equal(again.state_dict()["model"][name], t) for name, t in ema.state_dict()["model"].items())
    assert again.state_dict()["step"] == 5
    with pytest.raises(ValueError, match="not in"):
        EMA(model, 1.0)
