from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.models import build_model, init_weights
from reconv.models.layers.batch_norm import BatchNorm2d, LayerState
from reconv.models.layers.dropout import DropConnect, Dropout, sample_keys

OK = torch.tensor(True)
NOT_OK = torch.tensor(False)


def batch_of(images: Tensor, groups: tuple[int, ...], start: int = 0) -> Batch:
    return Batch({"images": images}, torch.arange(start, start + len(images)), groups)


def images_of(n: int, channels: int = 3, side: int = 8, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(n, channels, side, side, generator=torch.Generator().manual_seed(0), dtype=dtype)


def test_one_group_equals_torchs_batch_norm_with_its_running_statistics() -> None:
    ours, theirs = BatchNorm2d(3).double(), nn.BatchNorm2d(3).double()
    state = LayerState(ours)
    for step in range(3):
        x = images_of(6) + step
        state.set_micro_batch(batch_of(x, (6,)), step)
        assert torch.equal(ours(x), theirs(x))
        state.commit(OK)
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[name], value, rtol=1e-14, atol=1e-14)
    assert ours.num_batches_tracked == 3


def test_each_group_is_normalized_by_its_own_statistics() -> None:
    norm = BatchNorm2d(3).double()
    state = LayerState(norm)
    x = images_of(7)
    state.set_micro_batch(batch_of(x, (4, 3)), 0)
    y = norm(x)
    assert torch.equal(y[:4], nn.BatchNorm2d(3).double()(x[:4].contiguous()))
    assert torch.equal(y[4:], nn.BatchNorm2d(3).double()(x[4:].contiguous()))


def test_running_statistics_use_the_sample_weighted_mean_of_the_groups() -> None:
    norm = BatchNorm2d(3, momentum=0.25).double()
    state = LayerState(norm)
    x = images_of(9)
    for start, stop, groups in ((0, 6, (4, 2)), (6, 9, (3,))):
        state.set_micro_batch(batch_of(x[start:stop], groups, start), 0)
        norm(x[start:stop])
        assert torch.equal(norm.running_mean, torch.zeros(3, dtype=torch.float64)), "updated before commit"
    state.commit(OK)
    parts = [x[:4], x[4:6], x[6:]]
    mean = sum(len(p) * p.mean((0, 2, 3)) for p in parts) / 9
    var = sum(len(p) * p.transpose(0, 1).flatten(1).var(1, unbiased=True) for p in parts) / 9
    torch.testing.assert_close(norm.running_mean, 0.25 * mean)
    torch.testing.assert_close(norm.running_var, 0.75 + 0.25 * var)
    assert norm.num_batches_tracked == 1


def test_a_skipped_step_does_not_change_running_statistics() -> None:
    norm = BatchNorm2d(3).double()
    state = LayerState(norm)
    before = copy.deepcopy(norm.state_dict())
    bad = torch.full((4, 3, 2, 2), float("nan"), dtype=torch.float64)
    state.set_micro_batch(batch_of(bad, (4,)), 0)
    norm(bad)
    state.commit(NOT_OK)
    for name, value in before.items():
        assert torch.equal(norm.state_dict()[name], value), name
    x = images_of(4)
    state.set_micro_batch(batch_of(x, (4,)), 1)
    norm(x)
    state.commit(OK)
    assert torch.isfinite(norm.running_mean).all()
    assert norm.num_batches_tracked == 1


def test_a_group_of_one_value_outputs_the_bias_and_keeps_the_variance() -> None:
    norm = BatchNorm2d(3).double()
    nn.init.constant_(norm.bias, 0.5)
    state = LayerState(norm)
    x = images_of(3, side=1).requires_grad_()
    state.set_micro_batch(batch_of(x, (2, 1)), 0)
    y = norm(x)
    y.sum().backward()
    assert torch.equal(y[2:], torch.full((1, 3, 1, 1), 0.5, dtype=torch.float64))
    assert x.grad is not None and torch.isfinite(x.grad).all()
    state.commit(OK)
    expected_var = 0.9 + 0.1 * (2 * x[:2].detach().flatten(1).var(0, unbiased=True) + 1) / 3
    torch.testing.assert_close(norm.running_var, expected_var)
    torch.testing.assert_close(norm.running_mean, 0.1 * x.detach().flatten(1).mean(0))


def test_outside_the_trainer_batch_norm_equals_torchs() -> None:
    ours, theirs = BatchNorm2d(3), nn.BatchNorm2d(3)
    x = images_of(5, dtype=torch.float32)
    assert torch.equal(ours(x), theirs(x))
    for name, value in theirs.state_dict().items():
        assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(ours.eval()(x), theirs.eval()(x))


def run_step(model: nn.Module, x: Tensor, micro: list[tuple[int, ...]]) -> tuple[Tensor, list[Tensor]]:
    """Outputs and gradients of one step over micro-batches given by their groups."""
    state, outputs, start = LayerState(model, seed=5), [], 0
    for groups in micro:
        rows = x[start : start + sum(groups)]
        state.set_micro_batch(batch_of(rows, groups, start), step=2)
        out = model(rows)
        (out.pow(2).sum() / len(x)).backward()
        outputs.append(out.detach())
        start += len(rows)
    state.commit(OK)
    return torch.cat(outputs), [p.grad for p in model.parameters() if p.grad is not None]


def test_micro_batches_of_whole_groups_equal_the_full_batch() -> None:
    results = []
    for micro in ([(4, 4, 3)], [(4,), (4, 3)], [(4, 4), (3,)], [(4,), (4,), (3,)]):
        model = build_model("resnet8_cifar", num_classes=10).double()
        init_weights(model, seed=1)
        outputs, grads = run_step(model, images_of(11), micro)
        results.append((outputs, grads, model.state_dict()))
    reference = results[0]
    for outputs, grads, buffers in results[1:]:
        torch.testing.assert_close(outputs, reference[0], rtol=1e-12, atol=1e-12)
        for a, b in zip(grads, reference[1], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-12)
        for name, value in reference[2].items():
            torch.testing.assert_close(buffers[name], value, rtol=1e-12, atol=1e-12)


def test_running_statistics_are_bitwise_independent_of_micro_batches() -> None:
    x = images_of(11, dtype=torch.float32)
    buffers = []
    for micro in ([(4, 4, 3)], [(4,), (4, 3)], [(4,), (4,), (3,)]):
        norm = BatchNorm2d(3)
        run_step(norm, x, micro)
        buffers.append(norm.state_dict())
    for other in buffers[1:]:
        for name, value in buffers[0].items():
            assert torch.equal(other[name], value), name


@pytest.mark.parametrize("layer", [Dropout(0.3), DropConnect(0.3), DropConnect(0.3, per="batch")])
def test_dropout_masks_do_not_depend_on_micro_batches(layer: nn.Module) -> None:
    x = torch.ones(11, 3, 4, 4)
    whole, _ = mask_of(layer, x, [(4, 4, 3)])
    split, _ = mask_of(layer, x, [(4,), (4, 3)])
    assert torch.equal(whole, split)
    if isinstance(layer, DropConnect) and layer.per == "batch":
        for group in whole.split((4, 4, 3)):
            assert group.unique().numel() == 1


def mask_of(layer: nn.Module, x: Tensor, micro: list[tuple[int, ...]], step: int = 0) -> tuple[Tensor, LayerState]:
    state, outputs, start = LayerState(layer, seed=5), [], 0
    for groups in micro:
        rows = x[start : start + sum(groups)]
        state.set_micro_batch(batch_of(rows, groups, start), step)
        outputs.append(layer(rows))
        start += len(rows)
    return torch.cat(outputs), state


def test_dropout_has_the_drop_rate_and_keeps_the_expectation() -> None:
    y, _ = mask_of(Dropout(0.3), torch.ones(64, 1000), [(64,)])
    kept = (y != 0).double()
    assert kept.mean().item() == pytest.approx(0.7, abs=0.01)
    assert y.max().item() == pytest.approx(1 / 0.7)
    correlation = torch.corrcoef(kept[:8])
    assert (correlation - torch.eye(8)).abs().max() < 0.15


def test_dropout_masks_differ_by_step_layer_and_seed() -> None:
    x = torch.ones(4, 100)
    first, _ = mask_of(Dropout(0.5), x, [(4,)], step=0)
    second, _ = mask_of(Dropout(0.5), x, [(4,)], step=1)
    assert not torch.equal(first, second)
    pair = nn.ModuleList([Dropout(0.5), Dropout(0.5)])
    LayerState(pair, seed=5).set_micro_batch(batch_of(x, (4,)), 0)
    assert not torch.equal(pair[0](x), pair[1](x))
    other = Dropout(0.5)
    LayerState(other, seed=6).set_micro_batch(batch_of(x, (4,)), 0)
    assert not torch.equal(other(x), first)


@pytest.mark.parametrize("step", [7, torch.tensor(7)], ids=["host", "device"])
def test_the_key_of_rows_without_a_sample_is_that_of_position_minus_one(step: int | Tensor) -> None:
    layer = Dropout(0.5)
    state = LayerState(layer, seed=5)
    for start in (0, 2**40):
        state.set_micro_batch(batch_of(torch.ones(4, 3), (4,), start), step)
        assert layer.sample_keys is not None and layer.shared_key is not None
        assert torch.equal(layer.sample_keys, sample_keys(torch.arange(start, start + 4), 7))
        assert torch.equal(layer.shared_key, sample_keys(torch.tensor([-1]), 7))


def test_dropout_is_off_in_evaluation_and_works_outside_the_trainer() -> None:
    for layer in (Dropout(0.5), DropConnect(0.5)):
        x = torch.ones(64, 3, 2, 2)
        assert torch.equal(layer.eval()(x), x)
        assert 0 < (layer.train()(x) == 0).double().mean().item() < 1


def test_unused_norms_keep_their_statistics() -> None:
    pair = nn.ModuleList([BatchNorm2d(3), BatchNorm2d(3)])
    state = LayerState(pair)
    x = images_of(4, dtype=torch.float32) + 1
    state.set_micro_batch(batch_of(x, (4,)), 0)
    pair[0](x)
    state.commit(OK)
    assert pair[0].num_batches_tracked == 1
    assert pair[1].num_batches_tracked == 0
