from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from reconv.core.errors import CheckpointError
from reconv.models import build_model
from reconv.optim import ModelEma

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)


def disturb(model: nn.Module, by: float) -> None:
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(by if tensor.is_floating_point() else 1)


@pytest.mark.parametrize("is_fused", [False, True])
def test_floats_are_averaged_with_warmup_and_counters_copied(is_fused: bool) -> None:
    model = build_model("resnet8_cifar", num_classes=10).double()
    ema = ModelEma(model, decay=0.9, is_fused=is_fused)
    expected = copy.deepcopy(model.state_dict())
    for step in range(4):
        disturb(model, 0.5)
        ema.update(ema.weight_at(step), OK)
        decay = min(0.9, (1 + step) / (10 + step))
        for name, value in model.state_dict().items():
            is_float = value.is_floating_point()
            expected[name] = decay * expected[name] + (1 - decay) * value if is_float else value.clone()
    averaged = ema.model.state_dict()
    assert averaged.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(averaged[name], value, msg=name)
    assert averaged["bn1.num_batches_tracked"] == 4


def test_without_warmup_the_decay_is_constant() -> None:
    model = nn.Linear(1, 1)
    assert ModelEma(model, decay=0.999, warmup=False).decay_at(0) == 0.999
    assert ModelEma(model, decay=0.999).decay_at(0) == 0.1
    assert ModelEma(model, decay=0.999).decay_at(10**6) == 0.999


@pytest.mark.parametrize("is_fused", [False, True])
def test_a_step_that_is_not_ok_leaves_the_ema_unchanged(is_fused: bool) -> None:
    model = build_model("resnet8_cifar", num_classes=10)
    ema = ModelEma(model, decay=0.5, is_fused=is_fused)
    before = copy.deepcopy(ema.state_dict())
    with torch.no_grad():
        for p in model.parameters():
            p.add_(1)
    ema.update(ema.weight_at(0), NOT_OK)
    assert all(torch.equal(value, before[name]) for name, value in ema.state_dict().items())


def test_the_copy_is_in_eval_mode_and_has_no_gradients() -> None:
    model = build_model("resnet8_cifar", num_classes=10).train()
    ema = ModelEma(model, decay=0.5)
    assert not any(m.training for m in ema.model.modules())
    assert not any(p.requires_grad for p in ema.model.parameters())
    assert model.training and all(p.requires_grad for p in model.parameters())


def test_a_loaded_ema_keeps_its_strides() -> None:
    model = build_model("resnet8_cifar", num_classes=10).to(memory_format=torch.channels_last)
    ema = ModelEma(model, decay=0.5)
    strides = {name: value.stride() for name, value in ema.state_dict().items()}
    saved = {name: (value + 1).contiguous() for name, value in ema.state_dict().items()}
    ema.load_state_dict(saved)
    for name, value in ema.state_dict().items():
        assert torch.equal(value, saved[name]), name
        assert value.stride() == strides[name], name
    ema.update(ema.weight_at(0), OK)
    assert not torch.equal(ema.state_dict()["conv1.weight"], saved["conv1.weight"])


def test_the_ema_of_another_model_is_an_error() -> None:
    with pytest.raises(CheckpointError, match="EMA"):
        ModelEma(nn.Linear(2, 2), decay=0.5).load_state_dict({"weight": torch.zeros(2, 2)})


def test_a_fused_ema_takes_its_weight_from_the_device() -> None:
    model = build_model("resnet8_cifar", num_classes=10).to(memory_format=torch.channels_last)
    plain, fused = ModelEma(model, decay=0.9), ModelEma(model, decay=0.9, is_fused=True)
    disturb(model, 0.5)
    plain.update(0.25, OK)
    fused.update(torch.tensor(0.25, dtype=torch.float64), OK)
    expected = plain.state_dict()
    for name, value in fused.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-6, atol=1e-6, msg=name)
