"""The training step: one division by the global weight, non-finite updates skipped on the device, no host sync."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from reconv.core.batch import Batch
from reconv.recipe.parts.optimizer import OptimizerConfig
from reconv.trainer.step import are_finite

from .conftest import Parts, batch


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
@pytest.mark.parametrize("precision", ["fp32", "fp64", "bf16"])
def test_non_finite_step_changes_no_tensor(poison: float, precision: str) -> None:
    parts = Parts(precision)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    clean, bad = batch(), batch(first=8, poison=poison)
    parts.step(0, [clean.replace(images=clean["images"].to(dtype))])
    before = parts.tensors()
    result = parts.step(1, [bad.replace(images=bad["images"].to(dtype))])
    after = parts.tensors()
    assert not bool(result.ok)
    assert len(before) > 60
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_a_finite_step_changes_every_weight() -> None:
    parts = Parts()
    before = parts.tensors()
    assert bool(parts.step(0, [batch()]).ok)
    after = parts.tensors()
    weights = [name for name, _ in parts.model.named_parameters()]
    assert [n for n in weights if torch.equal(before[f"model.{n}"], after[f"model.{n}"])] == []


def clipped(mode: str) -> OptimizerConfig:
    return OptimizerConfig.model_validate({} if mode == "off" else {"clip_grad": 0.01, "clip_mode": mode})


class CountHostReads(TorchDispatchMode):
    """Counts host reads of tensor values, which would synchronize with an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.reads = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.reads += func in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("mode", ["off", "norm", "value", "agc"])
def test_step_does_not_sync_with_the_host(precision: str, mode: str) -> None:
    parts = Parts(precision, clipped(mode))
    with CountHostReads() as counter:
        for step in range(3):
            parts.step(step, [batch(first=8 * step)])
    assert counter.reads == 0
    with CountHostReads() as counter:
        float(torch.ones(()))
    assert counter.reads == 1  # the counter can count


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_clipping_shortens_the_update_and_reports_the_norm_before(mode: str) -> None:
    plain, clipping = Parts("fp64"), Parts("fp64", clipped(mode))
    rows = batch(dtype=torch.float64)
    before = [p.detach().clone() for p in plain.model.parameters()]
    norms = [parts.step(0, [rows]).grad_norm for parts in (plain, clipping)]
    moved = [
        sum(float((p.detach() - old).abs().sum()) for p, old in zip(parts.model.parameters(), before, strict=True))
        for parts in (plain, clipping)
    ]
    assert torch.equal(norms[0], norms[1]) and float(norms[0]) > 0.1
    assert 0 < moved[1] < 0.9 * moved[0]


@pytest.mark.parametrize("mode", ["norm", "value", "agc"])
def test_a_non_finite_step_changes_no_tensor_with_clipping(mode: str) -> None:
    parts = Parts("fp32", clipped(mode))
    parts.step(0, [batch()])
    before = parts.tensors()
    result = parts.step(1, [batch(first=8, poison=float("inf"))])
    after = parts.tensors()
    assert not bool(result.ok)
    assert [name for name in before if not torch.equal(before[name], after[name])] == []


def test_loss_scaling_does_not_change_what_is_clipped() -> None:
    """Gradients are unscaled first: otherwise the scale of 65,536 would be clipped away."""
    lightly, heavily = (Parts("fp16", OptimizerConfig(clip_grad=x, momentum=0, weight_decay=0)) for x in (1e6, 1e-3))
    before = copy.deepcopy(lightly.model.state_dict())
    norm = float(lightly.step(0, [batch()]).grad_norm)
    heavily.step(0, [batch()])
    for name, p in heavily.model.named_parameters():
        full = lightly.model.get_parameter(name).detach() - before[name]
        torch.testing.assert_close(p.detach() - before[name], full * 1e-3 / norm, rtol=1e-2, atol=1e-7)


def test_loss_is_divided_by_the_weight_of_all_micro_batches() -> None:
    whole, halves = Parts("fp64"), Parts("fp64")
    for parts in (whole, halves):
        parts.model.eval()  # running statistics: a sample's output does not depend on its batch
    rows = batch(8)
    images = rows["images"].double()
    one = Batch({**rows.tensors, "images": images}, rows.positions, (3, 5))
    split = list(one.by_group())
    loss_one, loss_split = whole.step(0, [one]).loss, halves.step(0, split).loss
    assert torch.allclose(loss_one, loss_split, rtol=1e-14)
    for a, b in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-14)


def test_a_step_is_sgd_on_the_mean_loss_of_the_batch() -> None:
    parts = Parts("fp64", OptimizerConfig(momentum=0, weight_decay=0))
    parts.model.eval()
    rows, model = batch(8), copy.deepcopy(parts.model)
    images = rows["images"].double()
    F.cross_entropy(model(images), rows["targets"]).backward()
    result = parts.step(0, [Batch({**rows.tensors, "images": images}, rows.positions, (3, 5))])
    assert bool(result.ok)
    for new, old in zip(parts.model.parameters(), model.parameters(), strict=True):
        assert old.grad is not None
        assert torch.allclose(new, old - 0.1 * old.grad, rtol=0, atol=1e-14)


@pytest.mark.parametrize("loss", [0.0, -1e38, 3e38, torch.inf, -torch.inf, torch.nan])
@pytest.mark.parametrize("grad_norm", [0.0, 3e38, torch.inf, torch.nan])
def test_are_finite_is_that_of_torch(loss: float, grad_norm: float) -> None:
    values = torch.tensor([loss, grad_norm])
    ok = are_finite(values[0], values[1])
    assert ok.dtype == torch.bool and ok.shape == ()
    assert torch.equal(ok, values.isfinite().all())
    assert torch.equal(are_finite(values[0].double(), values[1]), ok)
