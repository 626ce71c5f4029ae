"""Gradient clipping against torch's functions and against timm's formula of AGC."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from reconv.models import build_model
from reconv.optim import ClipGrad, Rounding, build_clip_grad, build_optimizer
from reconv.recipe.parts.optimizer import OptimizerConfig


def network() -> nn.Module:
    """Layers with weights of all numbers of dimensions; a unit of the convolution has weights of zero."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(4, 6), nn.Linear(6, 3))
    with torch.no_grad():
        model[0].weight[1] = 0
    return model.double().to(memory_format=torch.channels_last)


def give_gradients(model: nn.Module, scale: float) -> None:
    generator = torch.Generator().manual_seed(1)
    for p in model.parameters():
        noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
        p.grad = torch.empty_like(p).copy_(
            noise * scale * torch.linspace(0.01, 1, len(p)).view(-1, *[1] * (p.ndim - 1))
        )


def total_norm(model: nn.Module) -> Tensor:
    return torch.linalg.vector_norm(torch.cat([p.grad.reshape(-1) for p in model.parameters() if p.grad is not None]))


def clipped(model: nn.Module, clip: ClipGrad) -> dict[str, Tensor]:
    clip(dict(model.named_parameters()), total_norm(model))
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
def test_norm_clipping_equals_torchs(scale: float) -> None:
    model, twin = network(), network()
    give_gradients(model, scale)
    give_gradients(twin, scale)
    before = total_norm(model)
    found = clipped(model, ClipGrad("norm", 0.7))
    torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.7)
    assert (float(total_norm(model)) < float(before)) == (scale > 0.01)
    assert len(found) == 8
    for name, p in twin.named_parameters():
        assert p.grad is not None
        torch.testing.assert_close(found[name], p.grad, rtol=1e-14, atol=0)


def test_value_clipping_equals_torchs() -> None:
    model, twin = network(), network()
    give_gradients(model, 1.0)
    give_gradients(twin, 1.0)
    found = clipped(model, ClipGrad("value", 0.3))
    torch.nn.utils.clip_grad_value_(twin.parameters(), 0.3)
    assert max(float(g.abs().max()) for g in found.values()) == 0.3
    assert all(torch.equal(found[name], p.grad) for name, p in twin.named_parameters() if p.grad is not None)


def agc_by_hand(p: Tensor, grad: Tensor, clip_factor: float) -> Tensor:
    """timm's adaptive_clip_grad for one parameter."""

    def unitwise_norm(x: Tensor) -> Tensor:
        return x.norm(2.0) if x.ndim <= 1 else x.norm(2.0, dim=tuple(range(1, x.ndim)), keepdim=True)

    max_norm = unitwise_norm(p).clamp(min=1e-3).mul(clip_factor)
    grad_norm = unitwise_norm(grad)
    clipped_grad = grad * (max_norm / grad_norm.clamp(min=1e-6))
    return torch.where(grad_norm < max_norm, grad, clipped_grad)


def test_agc_equals_timms_formula_and_leaves_the_head_alone() -> None:
    model = network()
    give_gradients(model, 0.05)
    before = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    clip = build_clip_grad(OptimizerConfig(clip_grad=0.1, clip_mode="agc"), model)
    assert clip is not None
    found = clipped(model, clip)
    for name, p in model.named_parameters():
        expected = before[name] if name.startswith("4.") else agc_by_hand(p.detach(), before[name], 0.1)
        torch.testing.assert_close(found[name], expected, rtol=1e-14, atol=0, msg=name)
    units = (found["0.weight"] == before["0.weight"]).flatten(1).all(1)
    assert units.any() and not units.all()
    assert not torch.equal(found["3.weight"], before["3.weight"])


def test_the_head_of_a_detector_is_not_clipped_adaptively() -> None:
    model = build_model("ssd_resnet34")
    clip = build_clip_grad(OptimizerConfig(clip_grad=0.1, clip_mode="agc"), model)
    assert clip is not None and {name.split(".")[0] for name in clip.agc_exclude} == {
        "extras",
        "class_heads",
        "box_heads",
    }


@pytest.mark.parametrize(
    ("section", "expected"),
    [
        (OptimizerConfig(), None),
        (OptimizerConfig(name="lamb"), ("norm", 1.0)),
        (OptimizerConfig(name="lamb", clip_grad="off"), None),
        (OptimizerConfig(name="lamb", clip_grad=0.01, clip_mode="agc"), ("agc", 0.01)),
        (OptimizerConfig.model_validate({"clip_grad": False}), None),
        (OptimizerConfig(clip_grad=5.0), ("norm", 5.0)),
    ],
)
def test_only_lamb_clips_by_default(section: OptimizerConfig, expected: tuple[str, float] | None) -> None:
    clip = build_clip_grad(section, network())
    assert (None if clip is None else (clip.mode, clip.value)) == expected


def test_gradients_of_half_precision_weights_are_clipped_in_float32() -> None:
    model = network().half()
    section = OptimizerConfig(clip_grad=1e-6, momentum=0, weight_decay=0, weight_decay_exclude="norm")
    optimizer, clip = (
        build_optimizer(section, model, rounding=Rounding(is_stochastic=False)),
        build_clip_grad(section, model),
    )
    assert clip is not None
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    before = copy.deepcopy(model.state_dict())
    params, grads = optimizer.params_with_grad(), optimizer.grads()
    assert [p.grad for p in params.values()] == grads and len(grads) == 8
    assert {p.dtype for p in params.values()} == {torch.float32}
    norm = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    clip(params, norm)
    optimizer.step(1e4, torch.tensor(True))  # each value is 1e-6 / norm, which float16 cannot represent
    expected = before["4.bias"].float() - 1e4 * 1e-6 / float(norm)
    torch.testing.assert_close(model[4].bias.float(), expected, rtol=1e-3, atol=1e-4)
    assert not torch.equal(model[4].bias, before["4.bias"])
