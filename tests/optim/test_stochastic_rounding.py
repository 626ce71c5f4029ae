"""Stochastic rounding: exact for representable values, unbiased, and reproducible."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.errors import CheckpointError
from reconv.data.readers.dataset_factory import open_dataset
from reconv.optim import HalfPrecisionOptimizer, ModelEma, Rounding, build_optimizer
from reconv.optim.stochastic_rounding import round_stochastic
from reconv.precision import build_precision
from reconv.recipe.parts.data import DataConfig
from reconv.recipe.parts.optimizer import OptimizerConfig
from reconv.recipe.parts.precision import PrecisionConfig

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)


def test_every_float16_number_is_unchanged() -> None:
    held = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(torch.float16)
    held = held[~held.isnan()]
    for draw in (0.0, 1 - 2.0**-24):
        rounded = round_stochastic(held.float(), torch.full(held.shape, draw))
        assert len(held) > 60_000 and torch.equal(rounded, held)
    assert round_stochastic(torch.tensor([torch.nan]), torch.zeros(1)).isnan().all()


def test_a_value_is_rounded_to_either_neighbor_without_bias() -> None:
    step = torch.finfo(torch.float16).eps
    values = torch.tensor([1 + step / 4, -1 - step / 4, 3 + step / 2, 1e-6, -70.3, 2.0**-16 * (1 + step / 8)])
    num = 2**14
    draws = (torch.arange(num) + 0.5) / num
    rounded = round_stochastic(values[:, None].expand(-1, num), draws.expand(len(values), -1)).double()
    assert all(len(row.unique()) == 2 for row in rounded)
    gaps = torch.stack([row.max() - row.min() for row in rounded])
    assert torch.equal(gaps, torch.tensor([step, step, 2 * step, 2.0**-24, 64 * step, 2.0**-24]).double())
    assert ((rounded - values.double()[:, None]).abs() < gaps[:, None]).all()
    assert ((rounded.mean(1) - values.double()).abs() <= gaps / num).all()


def half_layer() -> nn.Linear:
    layer = nn.Linear(40, 25)
    with torch.no_grad():
        layer.weight.fill_(1.0)
        layer.bias.fill_(1.0)
    for parameter in layer.parameters():
        parameter.data = parameter.data.half()
    return layer


PLAIN = OptimizerConfig(momentum=0.0, weight_decay=0.0)


def optimizer_of(
    layer: nn.Module, *, is_stochastic: bool, seed: int = 0, section: OptimizerConfig = PLAIN
) -> HalfPrecisionOptimizer:
    built = build_optimizer(section, layer, rounding=Rounding(is_stochastic, seed))
    assert isinstance(built, HalfPrecisionOptimizer)
    return built


def descend(layer: nn.Linear, optimizer: HalfPrecisionOptimizer, num_steps: int, lr: float, ok: Tensor = OK) -> None:
    for _ in range(num_steps):
        optimizer.zero_grad()
        for parameter in layer.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.grads()
        optimizer.step(lr, ok)


def test_updates_below_half_the_spacing_accumulate_unlike_with_nearest_rounding() -> None:
    lr, num_steps = 2.0**-14, 1000  # a half below 1 has steps of 2^-11: each update is an eighth of one
    exact = 1 - lr * num_steps
    layers = {is_stochastic: half_layer() for is_stochastic in (True, False)}
    for is_stochastic, layer in layers.items():
        descend(layer, optimizer_of(layer, is_stochastic=is_stochastic), num_steps, lr)
    assert torch.equal(layers[False].weight, torch.ones(25, 40, dtype=torch.float16))
    mean = layers[True].weight.double().mean().item()
    # 1,000 weights, 1,000 draws each of deviation below 2^-12: the mean deviates by 2^-12.
    assert abs(mean - exact) < 5 * 2.0**-12
    assert layers[True].weight.unique().numel() > 10, "weights have draws of their own"


def test_random_numbers_depend_only_on_seed_step_parameter_and_element() -> None:
    def weights_after(num_steps: int, seed: int, layout: torch.memory_format = torch.contiguous_format) -> Tensor:
        layer = nn.Conv2d(8, 8, 3, bias=False)
        with torch.no_grad():
            layer.weight.fill_(1.0)
        layer.weight.data = layer.weight.data.half().contiguous(memory_format=layout)
        optimizer = optimizer_of(layer, is_stochastic=True, seed=seed)
        for _ in range(num_steps):
            optimizer.zero_grad()
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step(2.0**-14, OK)
        return layer.weight.detach()

    assert torch.equal(weights_after(9, 0), weights_after(9, 0))
    assert torch.equal(weights_after(9, 0), weights_after(9, 0, torch.channels_last))
    assert not torch.equal(weights_after(9, 0), weights_after(9, 1))
    layer, alone = half_layer(), half_layer()
    alone.weight.requires_grad_(False)
    for each in (layer, alone):
        descend(each, optimizer_of(each, is_stochastic=True), 9, 2.0**-14)
    assert torch.equal(layer.bias, alone.bias), "a parameter's draws do not depend on who else is trained"
    assert not torch.equal(layer.weight[0, :25], layer.bias), "two parameters have draws of their own"


def digits() -> tuple[Tensor, Tensor]:
    source = open_dataset("digits", None, "train", DataConfig(source="digits"))
    samples = [source[index] for index in range(len(source))]
    images = torch.stack([torch.as_tensor(np.asarray(sample.data)).flatten() for sample in samples])
    return images / 255 - 0.3, torch.tensor([sample.target for sample in samples])


def loss_after(mode: str, rounding: Rounding | None, num_steps: int) -> float:
    """Descend on the digits with a linear classifier whose weights are around a half, in a mode's types."""
    images, labels = digits()
    policy = build_precision(PrecisionConfig.model_validate({"mode": mode}), "cpu")
    layer = nn.Linear(images.shape[1], 10)
    with torch.no_grad():
        layer.weight.copy_(torch.rand(layer.weight.shape, generator=torch.Generator().manual_seed(0)) / 4 + 0.5)
        layer.bias.fill_(0.5)
    policy.cast_model(layer)
    optimizer = build_optimizer(PLAIN, layer, rounding=rounding)
    for _ in range(num_steps):
        optimizer.zero_grad()
        with policy.autocast():
            outputs = layer(images.to(policy.input_dtype))
        loss = F.cross_entropy(outputs.float(), labels)
        policy.scale(loss).backward()
        grads = optimizer.grads()
        policy.unscale(grads)
        ok = torch.isfinite(torch.stack(torch._foreach_norm(grads))).all()
        optimizer.step(0.003, ok)
        policy.update(ok)
    return loss.item()


@pytest.mark.slow
def test_half_precision_weights_learn_where_nearest_rounding_stalls() -> None:
    first = loss_after("fp32", None, 1)
    full = loss_after("fp32", None, 500)
    stochastic = loss_after("16.16", Rounding(is_stochastic=True), 500)
    nearest = loss_after("16.16", Rounding(is_stochastic=False), 500)
    learned = first - full
    assert learned > 0.25
    assert abs(stochastic - full) < 0.02 * learned
    assert abs(nearest - first) < 0.001 * learned


KINDS = {
    "sgd": OptimizerConfig(momentum=0.9, weight_decay=1e-2),
    "sgd-foreach": OptimizerConfig(momentum=0.9, weight_decay=1e-2, implementation="foreach"),
    "lars": OptimizerConfig(name="lars", weight_decay=1e-2),
    "rmsprop": OptimizerConfig(name="rmsprop"),
    "rmsprop-tf": OptimizerConfig(name="rmsprop-tf"),
}


@pytest.mark.parametrize("kind", list(KINDS))
def test_a_step_that_is_not_ok_changes_no_bit(kind: str) -> None:
    layer = half_layer()
    optimizer = optimizer_of(layer, is_stochastic=True, section=KINDS[kind])
    descend(layer, optimizer, 3, 0.01)
    names = [name for name in optimizer.state_dict() if name != "rounding.step"]
    before = [t.clone() for t in (*layer.parameters(), *(optimizer.state_dict()[n] for n in names))]
    descend(layer, optimizer, 1, 0.01, NOT_OK)
    after = [*layer.parameters(), *(optimizer.state_dict()[n] for n in names)]
    assert len(after) > 2 and all(torch.equal(a, b) for a, b in zip(before, after, strict=True))


@pytest.mark.parametrize("kind", list(KINDS))
def test_loaded_state_continues_bitwise(kind: str) -> None:
    uninterrupted, stopped = half_layer(), half_layer()
    descend(uninterrupted, optimizer_of(uninterrupted, is_stochastic=True, section=KINDS[kind]), 6, 0.003)
    first = optimizer_of(stopped, is_stochastic=True, section=KINDS[kind])
    descend(stopped, first, 3, 0.003)
    second = optimizer_of(stopped, is_stochastic=True, section=KINDS[kind])
    second.load_state_dict({name: tensor.clone() for name, tensor in first.state_dict().items()})
    descend(stopped, second, 3, 0.003)
    assert torch.equal(uninterrupted.weight, stopped.weight) and torch.equal(uninterrupted.bias, stopped.bias)
    assert uninterrupted.weight.dtype == torch.float16
    with pytest.raises(CheckpointError, match="rounding"):
        optimizer_of(stopped, is_stochastic=False, section=KINDS[kind]).load_state_dict(first.state_dict())


def test_gradients_are_unscaled_in_float32() -> None:
    layer = half_layer()
    optimizer = optimizer_of(layer, is_stochastic=True)
    layer.weight.grad = torch.full_like(layer.weight, 2.0**-20)
    grads = optimizer.grads()
    torch._foreach_mul_(grads, 2.0**-10)
    assert [g.dtype for g in grads] == [torch.float32] and (grads[0] == 2.0**-30).all()
    optimizer.step(2.0**20, OK)  # an update of 2^-10, two steps of the type
    assert (layer.weight == 1 - 2.0**-10).all()


def test_the_ema_of_half_precision_weights_is_float32() -> None:
    layer = half_layer()
    average = ModelEma(layer, decay=0.999, warmup=False)
    with torch.no_grad():
        layer.weight.fill_(1 + 2.0**-10)
    for step in range(100):
        average.update(average.weight_at(step), OK)
    averaged = average.state_dict()["weight"]
    assert averaged.dtype == torch.float32
    expected = 1 + 2.0**-10 * (1 - 0.999**100)
    torch.testing.assert_close(averaged, torch.full_like(averaged, expected), rtol=1e-6, atol=0)
