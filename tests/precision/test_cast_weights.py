"""Casting all weights at once equals autocast bitwise, values and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from reconv.models import build_model, init_weights
from reconv.precision import PrecisionPolicy, build_precision
from reconv.recipe.parts.precision import PrecisionConfig


class Calls(TorchDispatchMode):
    """Counts the operators that are called."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def network(name: str) -> nn.Module:
    model = build_model(name, num_classes=10)
    init_weights(model, 0)
    return model.to(memory_format=torch.channels_last)


def passes(policy: PrecisionPolicy, model: nn.Module, rows: int = 2) -> Tensor:
    images = torch.randn(rows, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    torch.manual_seed(0)  # of what is dropped
    with policy.autocast():
        logits: Tensor = model(images.contiguous(memory_format=torch.channels_last))
    return logits


def policy_of(mode: str) -> PrecisionPolicy:
    return build_precision(PrecisionConfig(mode=mode), "cpu")  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["resnet8_cifar", "efficientnet_cifar"])
def test_logits_and_gradients_are_bitwise_those_of_autocast(name: str) -> None:
    model = network(name).train()
    twin = copy.deepcopy(model)
    plain, together = policy_of("bf16"), policy_of("bf16")
    together.cast_weights_once(twin)
    for _ in range(2):  # gradients add up over micro-batches
        expected, got = passes(plain, model), passes(together, twin)
        assert torch.equal(expected, got)
        for logits in (expected, got):
            logits.float().logsumexp(1).sum().backward()
    pairs = list(zip(model.named_parameters(), twin.parameters(), strict=True))
    assert len(pairs) > 20
    for (parameter, a), b in pairs:
        assert a.grad is not None and b.grad is not None, parameter
        assert torch.equal(a.grad, b.grad) and b.grad.dtype == torch.float32, parameter
        assert b.grad.stride() == b.stride(), parameter


def test_all_weights_are_cast_in_one_call_and_back_in_another() -> None:
    model, policy = network("resnet8_cifar").train(), policy_of("bf16")
    num_weights = sum(isinstance(module, nn.Conv2d | nn.Linear) for module in model.modules())
    found = {}
    for is_together in (False, True):
        if is_together:
            policy.cast_weights_once(model)
        with Calls() as calls:
            passes(policy, model).float().sum().backward()
        found[is_together] = [calls.names.count(f"aten.{name}.default") for name in ("_to_copy", "_foreach_copy_")]
    assert found[True][1] == 2 and found[False][1] == 0
    assert found[False][0] - found[True][0] == 2 * (num_weights + 1)  # the last layer has a bias


def test_concatenated_weights_are_cast_first() -> None:
    layers = nn.ModuleList([nn.Linear(4, 3, bias=False), nn.Linear(4, 2, bias=False)])
    plain, together = policy_of("bf16"), policy_of("bf16")
    together.cast_weights_once(layers)
    found = []
    for policy in (plain, together):
        with policy.autocast():
            joint = torch.cat([layer.weight for layer in layers])
            y = nn.functional.linear(torch.ones(2, 4), joint)
        found.append((joint.dtype, y, *torch.autograd.grad(y.float().exp().sum(), layers.parameters())))
    (first, *expected), (second, *got) = found
    assert (first, second) == (torch.float32, torch.bfloat16)
    assert len(got) == 3 and all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))


def test_weights_cast_for_kernels_are_cast_with_the_others() -> None:
    layer, images = nn.Conv2d(8, 8, 3, groups=8, bias=False), torch.randn(2, 8, 5, 5, dtype=torch.bfloat16)
    policy, found = policy_of("bf16"), []
    for is_together in (False, True):
        if is_together:
            policy.cast_weights_once(layer)
        with Calls() as calls, policy.autocast():
            weight = layer.weight.to(torch.bfloat16)
            gradient = torch.autograd.grad((weight * images[:, :, :3, :1].sum(0)[:, None]).sum(), layer.parameters())
            wide = layer.weight.to(torch.float64)
        assert torch.equal(wide.float(), layer.weight)  # what is wanted in another type is not rounded on the way
        found.append((weight, *gradient))
        assert calls.names.count("aten._foreach_copy_.default") == 2 * is_together
        assert calls.names.count("aten._to_copy.default") == (1 if is_together else 3)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_frozen_and_unused_weights_get_no_gradient() -> None:
    class Some(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.frozen, self.used, self.unused = (nn.Linear(4, 4) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.used(self.frozen(x))
            return y

    model, policy = Some(), policy_of("bf16")
    policy.cast_weights_once(model)
    images = torch.ones(2, 4, dtype=torch.bfloat16)
    with Calls() as calls, policy.autocast():
        assert not model.frozen(images).requires_grad  # else an unused gradient would be computed
        model(images).float().sum().backward()
    # Of the output to float32 and of its gradient; the frozen weights are cast with the others.
    assert calls.names.count("aten._to_copy.default") == 2
    assert {name for name, p in model.named_parameters() if p.grad is not None} == {"used.weight", "used.bias"}


def test_a_pass_without_gradients_makes_its_own_copies() -> None:
    model, policy = nn.Linear(4, 4), policy_of("bf16")
    policy.cast_weights_once(model)
    with policy.autocast():
        with torch.no_grad():
            model(torch.ones(2, 4))
        model(torch.ones(2, 4)).float().sum().backward()
    assert model.weight.grad is not None


def test_each_pass_sees_the_current_weights() -> None:
    model, policy = nn.Linear(4, 4), policy_of("bf16")
    policy.cast_weights_once(model)
    with torch.no_grad():
        outputs = []
        for _ in range(2):
            with policy.autocast():
                outputs.append(model(torch.ones(2, 4)))
            model.weight.mul_(2)
    assert not torch.equal(*outputs)


@pytest.mark.parametrize("mode", ["fp32", "bf16-all"])
def test_modes_without_autocast_are_unchanged(mode: str) -> None:
    model, policy = network("resnet8_cifar").eval(), policy_of(mode)
    before = passes(policy, model)
    policy.cast_weights_once(model)
    assert torch.equal(passes(policy, model), before)
