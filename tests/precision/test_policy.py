from __future__ import annotations

import pytest
import torch
from torch import nn

from reconv.core.errors import CheckpointError, UsageError
from reconv.precision import GROWTH_INTERVAL, INIT_SCALE, MAX_SCALE, PrecisionPolicy, build_precision
from reconv.recipe.parts.precision import PrecisionConfig

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)


def policy_of(mode: str, loss_scale: float | str = "dynamic") -> PrecisionPolicy:
    return build_precision(PrecisionConfig.model_validate({"mode": mode, "loss_scale": loss_scale}), "cpu")


@pytest.mark.parametrize(
    ("mode", "parameters", "products"),
    [
        ("fp64", torch.float64, torch.float64),
        ("fp32", torch.float32, torch.float32),
        ("bf16", torch.float32, torch.bfloat16),
        ("fp16", torch.float32, torch.float16),
    ],
)
def test_a_policy_casts_parameters_and_products(mode: str, parameters: torch.dtype, products: torch.dtype) -> None:
    policy = policy_of(mode)
    layer = policy.cast_model(nn.Linear(4, 4))
    assert layer.weight.dtype == parameters == policy.dtype
    with policy.autocast():
        assert layer(torch.ones(2, 4, dtype=policy.dtype)).dtype == products


@pytest.mark.parametrize("mode", ["fp64", "fp32", "bf16"])
def test_policies_without_loss_scaling_do_nothing(mode: str) -> None:
    policy = policy_of(mode)
    loss = torch.tensor(3.0)
    grads = [torch.ones(2)]
    assert policy.scale(loss) is loss
    policy.unscale(grads)
    policy.update(NOT_OK)
    assert torch.equal(grads[0], torch.ones(2))
    assert policy.state_dict() == {}
    assert policy.loss_scale is None and not policy.expects_overflow


def scale_of(policy: PrecisionPolicy) -> float:
    assert policy.loss_scale is not None
    return policy.loss_scale.item()


def test_unscaled_gradients_are_exact() -> None:
    policy = policy_of("fp16")
    weight = torch.tensor([0.3, -2.0], requires_grad=True)
    policy.scale((weight * weight).sum()).backward()
    assert weight.grad is not None
    assert weight.grad[1].item() == -4.0 * INIT_SCALE
    policy.unscale([weight.grad])
    assert torch.equal(weight.grad, 2 * weight.detach())


def test_the_dynamic_scale_halves_on_overflow_and_doubles_after_enough_finite_steps() -> None:
    policy = policy_of("fp16")
    policy.update(NOT_OK)
    policy.update(NOT_OK)
    assert scale_of(policy) == INIT_SCALE / 4
    for _ in range(GROWTH_INTERVAL - 1):
        policy.update(OK)
    assert scale_of(policy) == INIT_SCALE / 4
    policy.update(OK)
    assert scale_of(policy) == INIT_SCALE / 2
    policy.update(OK)
    assert scale_of(policy) == INIT_SCALE / 2, "the count starts again after growing"
    for _ in range(40):
        policy.update(NOT_OK)
    assert scale_of(policy) == 1.0


def test_an_overflow_restarts_the_count_of_finite_steps() -> None:
    policy = policy_of("fp16")
    for _ in range(GROWTH_INTERVAL - 1):
        policy.update(OK)
    policy.update(NOT_OK)
    policy.update(OK)
    assert scale_of(policy) == INIT_SCALE / 2


def test_the_scale_stops_growing_at_its_limit() -> None:
    policy = policy_of("fp16")
    policy.load_state_dict(
        {"loss_scale": torch.tensor(MAX_SCALE), "growth_steps": torch.tensor(1999, dtype=torch.int32)}
    )
    policy.update(OK)
    assert scale_of(policy) == MAX_SCALE


def test_a_static_scale_never_changes() -> None:
    policy = policy_of("fp16", 128.0)
    policy.update(NOT_OK)
    assert scale_of(policy) == 128.0
    assert not policy.expects_overflow


def test_the_scale_survives_a_checkpoint_and_other_states_are_errors() -> None:
    policy, twin = policy_of("fp16"), policy_of("fp16")
    policy.update(NOT_OK)
    policy.update(OK)
    twin.load_state_dict({name: tensor.clone() for name, tensor in policy.state_dict().items()})
    assert {n: t.item() for n, t in twin.state_dict().items()} == {"loss_scale": INIT_SCALE / 2, "growth_steps": 1}
    with pytest.raises(CheckpointError, match="precision"):
        policy_of("fp32").load_state_dict(policy.state_dict())


def test_unsupported_modes_of_a_device_are_errors() -> None:
    with pytest.raises(UsageError, match="tf32"):
        build_precision(PrecisionConfig(mode="tf32"), "cpu")
    with pytest.raises(UsageError, match="float64"):
        build_precision(PrecisionConfig(mode="fp64"), "mps")
