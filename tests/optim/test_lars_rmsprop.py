"""LARS and both forms of RMSprop against plain loops written from their formulas, and against torch's own."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reconv.models import build_model
from reconv.optim import LARS, SGD, RMSprop, build_optimizer, decay_groups
from reconv.recipe.parts.optimizer import OptimizerConfig

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)
NUM_STEPS = 20
Numbers = list[float]


def network() -> nn.Module:
    """Two layers and a norm in fp64; one weight starts at zero, so that a norm of zero is met."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 3)).double()
    nn.init.zeros_(model[3].weight)
    return model.to(memory_format=torch.channels_last)


def give_gradients(model: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    for name, p in model.named_parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64).to(p.dtype)
        # The convolution's gradient is zero once: LARS meets the other norm of zero.
        p.grad = torch.empty_like(p).copy_(noise * (0 if (name, step) == ("0.weight", 3) else 1))


def lr_at(step: int) -> float:
    return 0.3 / (1 + step)


def norm(values: Numbers) -> float:
    return math.sqrt(sum(value * value for value in values))


def lars_by_hand(w: Numbers, g: Numbers, v: Numbers, lr: float, adapted: bool) -> None:
    decay, momentum, trust, epsilon = 0.05, 0.9, 0.02, 1e-3
    ratio = 1.0
    if adapted:
        if norm(w) > 0 and norm(g) > 0:
            ratio = trust * norm(w) / (norm(g) + decay * norm(w) + epsilon)
        g[:] = [gi + decay * wi for gi, wi in zip(g, w, strict=True)]
    for i in range(len(w)):
        v[i] = momentum * v[i] + lr * ratio * g[i]
        w[i] -= v[i]


def rmsprop_by_hand(form: str, momentum: float) -> Callable[[Numbers, Numbers, Numbers, Numbers, float, bool], None]:
    def update(w: Numbers, g: Numbers, s: Numbers, v: Numbers, lr: float, decayed: bool) -> None:
        for i in range(len(w)):
            gi = g[i] + (0.05 * w[i] if decayed else 0.0)
            s[i] = 0.8 * s[i] + 0.2 * gi * gi
            if form == "tensorflow":
                v[i] = momentum * v[i] + lr * gi / math.sqrt(s[i] + 1e-3)
                w[i] -= v[i]
            else:
                v[i] = momentum * v[i] + gi / (math.sqrt(s[i]) + 1e-3)
                w[i] -= lr * v[i]

    return update


def flat(tensor: Tensor | None) -> Numbers:
    assert tensor is not None
    return [float(value) for value in tensor.detach().reshape(-1).tolist()]


def assert_equals(model: nn.Module, expected: dict[str, Numbers]) -> None:
    assert len(expected) == 6
    for name, p in model.named_parameters():
        torch.testing.assert_close(
            p.detach().reshape(-1), torch.tensor(expected[name], dtype=p.dtype), rtol=1e-12, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_lars_equals_a_loop_written_from_its_formula(implementation: Any) -> None:
    model = network()
    groups = decay_groups(model, "norm-bias")
    lars = LARS(
        groups,
        momentum=0.9,
        nesterov=False,
        weight_decay=0.05,
        trust_coefficient=0.02,
        epsilon=1e-3,
        implementation=implementation,
    )
    weights = {name: flat(p) for name, p in model.named_parameters()}
    velocities = {name: [0.0] * len(w) for name, w in weights.items()}
    for step in range(NUM_STEPS):
        give_gradients(model, step)
        for name, p in model.named_parameters():
            lars_by_hand(weights[name], flat(p.grad), velocities[name], lr_at(step), name in ("0.weight", "3.weight"))
        lars.step(lr_at(step), OK)
    assert_equals(model, weights)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("form", ["torch", "tensorflow"])
@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_rmsprop_equals_a_loop_written_from_its_formula(implementation: Any, form: Any, momentum: float) -> None:
    model = network()
    groups = decay_groups(model, "norm")
    rmsprop = RMSprop(
        groups, form=form, alpha=0.8, epsilon=1e-3, momentum=momentum, weight_decay=0.05, implementation=implementation
    )
    update = rmsprop_by_hand(form, momentum)
    weights = {name: flat(p) for name, p in model.named_parameters()}
    squares = {name: [1.0 if form == "tensorflow" else 0.0] * len(w) for name, w in weights.items()}
    velocities = {name: [0.0] * len(w) for name, w in weights.items()}
    for step in range(NUM_STEPS):
        give_gradients(model, step)
        for name, p in model.named_parameters():
            update(weights[name], flat(p.grad), squares[name], velocities[name], lr_at(step), not name.startswith("1."))
        rmsprop.step(lr_at(step), OK)
    assert_equals(model, weights)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rmsprop_equals_torchs(momentum: float) -> None:
    model = network()
    twin = copy.deepcopy(model)
    ours = build_optimizer(
        OptimizerConfig(name="rmsprop", alpha=0.95, eps=1e-2, momentum=momentum, weight_decay=1e-2), model
    )
    theirs = torch.optim.RMSprop(twin.parameters(), alpha=0.95, eps=1e-2, momentum=momentum, weight_decay=1e-2)
    for step in range(NUM_STEPS):
        give_gradients(model, step)
        give_gradients(twin, step)
        ours.step(lr_at(step), OK)
        theirs.param_groups[0]["lr"] = lr_at(step)
        theirs.step()
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)


@pytest.mark.parametrize("form", ["torch", "tensorflow"])
def test_fused_rmsprop_takes_lr_and_ok_from_the_device_and_skips_a_bad_step(form: Any) -> None:
    models = [network().float() for _ in range(2)]
    options: dict[str, Any] = {"form": form, "alpha": 0.8, "epsilon": 1e-3, "momentum": 0.9, "weight_decay": 0.05}
    plain = RMSprop(decay_groups(models[0], "norm"), **options)
    fused = RMSprop(decay_groups(models[1], "norm"), **options, implementation="fused")
    for step in range(3):
        for model, optimizer, lr in ((models[0], plain, 0.1), (models[1], fused, torch.tensor(0.1).double())):
            give_gradients(model, step)
            optimizer.step(lr, OK)
    before = {name: p.detach().clone() for name, p in models[1].named_parameters()} | {
        name: tensor.clone() for name, tensor in fused.state_dict().items()
    }
    for grad in fused.grads():
        grad.fill_(float("nan"))
    fused.step(torch.tensor(0.1).double(), NOT_OK)
    after = dict(models[1].named_parameters()) | fused.state_dict()
    expected = dict(models[0].named_parameters()) | plain.state_dict()
    assert len(before) == 3 * 6
    for name, value in before.items():
        assert torch.equal(after[name], value), name
        torch.testing.assert_close(value, expected[name].detach(), rtol=1e-5, atol=1e-6, msg=name)


def test_lars_without_decayed_parameters_is_sgd_at_a_constant_lr() -> None:
    """The lr before or after momentum is the same while it does not change."""
    model = network()
    twin = copy.deepcopy(model)
    skipped = decay_groups(model, "none")
    skipped.no_decay.update(skipped.decay)
    skipped.decay.clear()
    lars = LARS(skipped, momentum=0.9, nesterov=True, weight_decay=0.5, trust_coefficient=0.001, epsilon=0.0)
    sgd = SGD(decay_groups(twin, "none"), momentum=0.9, nesterov=True, weight_decay=0.0)
    for step in range(NUM_STEPS):
        for m, optimizer in ((model, lars), (twin, sgd)):
            give_gradients(m, step)
            optimizer.step(0.1, OK)
    for (name, a), b in zip(model.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12, msg=name)


def test_lars_decays_once_and_excludes_norms_and_biases_by_default() -> None:
    model = network()
    nn.init.ones_(model[3].weight)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    lars = build_optimizer(OptimizerConfig(name="lars", weight_decay=0.25, momentum=0.0), model)
    lars.step(0.5, OK)
    for name, p in model.named_parameters():
        share = 0.5 * 0.25 if name in ("0.weight", "3.weight") else 0.0  # a gradient of zero has a ratio of 1
        torch.testing.assert_close(p.detach(), before[name] * (1 - share), rtol=1e-12, atol=0, msg=name)


KINDS = [
    OptimizerConfig(name="sgd", nesterov=True),
    OptimizerConfig(name="sgd", implementation="foreach"),
    OptimizerConfig(name="lars"),
    OptimizerConfig(name="lars", implementation="foreach"),
    OptimizerConfig(name="rmsprop"),
    OptimizerConfig(name="rmsprop-tf"),
    OptimizerConfig(name="adamw"),
    OptimizerConfig(name="adamw", implementation="foreach"),
    OptimizerConfig(name="lamb", weight_decay=0.02),
]
NAMES = [f"{kind.name}-{kind.implementation}" for kind in KINDS]


@pytest.mark.parametrize("section", KINDS, ids=NAMES)
def test_a_step_that_is_not_ok_changes_neither_weights_nor_state(section: OptimizerConfig) -> None:
    model = network()
    optimizer = build_optimizer(section, model)
    give_gradients(model, 0)
    optimizer.step(0.1, OK)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: tensor.clone() for name, tensor in optimizer.state_dict().items()}
    assert len(state) >= len(weights)
    for bad in (float("nan"), float("inf")):
        for grad in optimizer.grads():
            grad.fill_(bad)
        optimizer.step(0.1, NOT_OK)
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(torch.equal(tensor, state[name]) for name, tensor in optimizer.state_dict().items())


@pytest.mark.parametrize("section", KINDS, ids=NAMES)
def test_loaded_state_keeps_the_strides_and_continues_bitwise(section: OptimizerConfig) -> None:
    model = build_model("resnet8_cifar", num_classes=10).to(memory_format=torch.channels_last)
    first = build_optimizer(section, model)
    for step in range(2):
        give_gradients(model, step)
        first.step(0.1, OK)
    twin = copy.deepcopy(model)
    second = build_optimizer(section, twin)
    second.load_state_dict({name: tensor.contiguous().clone() for name, tensor in first.state_dict().items()})
    strides = {name: p.stride() for name, p in twin.named_parameters()}
    assert strides["layer1.0.conv1.weight"] != twin.layer1[0].conv1.weight.contiguous().stride()
    for name, tensor in second.state_dict().items():
        kind, parameter = name.split(".", 1)
        assert tensor.stride() == (() if kind == "step" else strides[parameter]), name
    for m, optimizer in ((model, first), (twin, second)):
        give_gradients(m, 2)
        optimizer.step(0.1, OK)
    assert first.state_dict().keys() == second.state_dict().keys()
    assert all(torch.equal(tensor, second.state_dict()[name]) for name, tensor in first.state_dict().items())
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), twin.parameters(), strict=True))


@pytest.mark.parametrize("section", KINDS, ids=NAMES)
def test_a_step_does_not_synchronize_with_the_host(section: OptimizerConfig) -> None:
    """A tensor without data would raise on any read: `meta` has shapes only."""
    if section.name == "sgd" and section.implementation == "auto":
        section = section.model_copy(update={"implementation": "foreach"})  # the fused kernel has no meta form
    if section.name in ("lars", "adamw"):
        section = section.model_copy(update={"implementation": "foreach"})
    model = network().to("meta")
    optimizer = build_optimizer(section, model)
    for p in model.parameters():
        p.grad = torch.empty_like(p)
    optimizer.step(0.1, torch.empty((), dtype=torch.bool, device="meta"))


def test_auto_is_fused_and_foreach_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    fused = torch._fused_sgd_

    def counted(*args: Any, **options: Any) -> Any:
        calls.append(len(args[0]))
        return fused(*args, **options)

    monkeypatch.setattr(torch, "_fused_sgd_", counted)
    found = {}
    for section in KINDS[:4]:
        model = network()
        give_gradients(model, 0)
        calls.clear()
        build_optimizer(section, model).step(0.1, OK)
        found[f"{section.name}-{section.implementation}"] = sum(calls)
    assert found == {"sgd-auto": 6, "sgd-foreach": 0, "lars-auto": 6, "lars-foreach": 0}


@pytest.mark.parametrize("kind", ["sgd", "lars", "rmsprop", "rmsprop-tf", "adamw", "lamb"])
def test_zero_grad_frees_the_gradients(kind: str) -> None:
    model = build_model("resnet8_cifar", num_classes=10)
    optimizer = build_optimizer(OptimizerConfig.model_validate({"name": kind}), model)
    model(torch.randn(2, 3, 8, 8)).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    optimizer.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
