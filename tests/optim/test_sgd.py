from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from reconv.core.errors import CheckpointError
from reconv.models import build_model
from reconv.optim import SGD, build_optimizer, decay_groups
from reconv.recipe.parts.optimizer import OptimizerConfig

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)


def give_gradients(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for p in model.parameters():
        p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
@pytest.mark.parametrize("weight_decay", [0.0, 1e-2])
def test_sgd_equals_torchs(implementation: str, momentum: float, nesterov: bool, weight_decay: float) -> None:
    ours = build_model("resnet8_cifar", num_classes=10)
    theirs = copy.deepcopy(ours)
    sgd = SGD(
        decay_groups(ours, "none"),
        momentum=momentum,
        nesterov=nesterov,
        weight_decay=weight_decay,
        implementation=implementation,
    )
    reference = torch.optim.SGD(
        theirs.parameters(), lr=1.0, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay
    )
    for step in range(5):
        lr = 0.1 / (1 + step)
        give_gradients(ours, step)
        give_gradients(theirs, step)
        sgd.step(lr, OK)
        reference.param_groups[0]["lr"] = lr
        reference.step()
        sgd.zero_grad()
    assert sgd.grads() == []
    for (name, a), b in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        # The fused kernel contracts products and sums: equal to a rounding, not to the bit.
        torch.testing.assert_close(
            a, b, rtol=1e-6 if implementation == "fused" else 0, atol=1e-7 if implementation == "fused" else 0, msg=name
        )


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_a_step_that_is_not_ok_changes_nothing(implementation: str) -> None:
    model = build_model("resnet8_cifar", num_classes=10)
    sgd = SGD(
        decay_groups(model, "norm"), momentum=0.9, nesterov=True, weight_decay=1e-4, implementation=implementation
    )
    give_gradients(model, 0)
    sgd.step(0.1, OK)
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    momenta = {name: b.clone() for name, b in sgd.state_dict().items()}
    for grad in sgd.grads():
        grad.fill_(float("nan"))
    sgd.step(0.1, NOT_OK)
    for name, p in model.named_parameters():
        assert torch.equal(p, weights[name]), name
    assert momenta and all(torch.equal(b, momenta[name]) for name, b in sgd.state_dict().items())


def test_parameters_without_gradient_are_unchanged_and_frozen_ones_excluded() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 2))
    model[0].requires_grad_(False)
    sgd = build_optimizer(OptimizerConfig(weight_decay=0.1), model)
    before = copy.deepcopy(model.state_dict())
    for p in model[1].parameters():
        p.grad = torch.ones_like(p)
    sgd.step(0.1, OK)
    assert len(sgd.grads()) == 2
    changed = [name for name, value in model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["1.weight", "1.bias"]
    assert not any("0." in name for name in sgd.state_dict())


def contiguous(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """What a safetensors file gives back: plain strides."""
    return {name: tensor.contiguous().clone() for name, tensor in state.items()}


@pytest.mark.parametrize("implementation", ["foreach", "fused"])
def test_loaded_momentum_has_the_strides_of_the_parameters(implementation: str) -> None:
    model = build_model("resnet8_cifar", num_classes=10).to(memory_format=torch.channels_last)
    twin = copy.deepcopy(model)
    first = SGD(
        decay_groups(model, "none"), momentum=0.9, nesterov=False, weight_decay=0.0, implementation=implementation
    )
    give_gradients(model, 0)
    first.step(0.1, OK)
    twin.load_state_dict(contiguous(model.state_dict()))
    second = SGD(
        decay_groups(twin, "none"), momentum=0.9, nesterov=False, weight_decay=0.0, implementation=implementation
    )
    second.load_state_dict(contiguous(first.state_dict()))
    strides = {name: p.stride() for name, p in twin.named_parameters()}
    assert strides["conv1.weight"] != twin.conv1.weight.contiguous().stride()
    assert all(b.stride() == strides[name.removeprefix("momentum.")] for name, b in second.state_dict().items())
    for m, sgd in ((model, first), (twin, second)):
        give_gradients(m, 1)
        sgd.step(0.1, OK)
    for (name, a), b in zip(model.named_parameters(), twin.named_parameters(), strict=True):
        assert torch.equal(a, b[1]), name


def test_fused_accepts_gradients_with_other_strides() -> None:
    results = []
    for implementation in ("foreach", "fused"):
        conv = nn.Conv2d(8, 8, 3).to(memory_format=torch.channels_last)
        nn.init.ones_(conv.weight)
        conv.weight.grad = torch.arange(576.0).view(8, 8, 3, 3)
        SGD(
            decay_groups(conv, "none"), momentum=0.9, nesterov=False, weight_decay=0.0, implementation=implementation
        ).step(0.01, OK)
        results.append(conv.weight.detach())
    torch.testing.assert_close(results[0], results[1])


def test_loading_the_state_of_another_model_is_an_error() -> None:
    sgd = build_optimizer(OptimizerConfig(), nn.Linear(2, 2))
    with pytest.raises(CheckpointError, match="does not match"):
        sgd.load_state_dict({"momentum.other": torch.zeros(2)})
    wrong = {name: torch.zeros(7) for name in sgd.state_dict()}
    with pytest.raises(CheckpointError, match="shape"):
        sgd.load_state_dict(wrong)
