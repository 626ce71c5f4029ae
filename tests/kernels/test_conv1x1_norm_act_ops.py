"""Fused 1x1 convolution, norm and activation equal plain operations, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, TOLERANCE, as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain
from torch import Tensor, nn

from reconv.kernels import reference
from reconv.kernels.fused.conv1x1 import conv1x1_norm_act
from reconv.kernels.fused.norm import FusedBatchNorm2d
from reconv.kernels.ops.batch_norm import NormParams
from reconv.kernels.ops.conv1x1_norm_act import conv1x1_batch_norm_act, supports
from reconv.kernels.reference import Activation

# Shape, outputs and groups; rows and channels that fill no tile, a group of two rows, and several splits of the rows.
SHAPES = [
    ((4, 16, 13, 12), 40, (4,)),
    ((3, 16, 5, 7), 96, (3,)),
    ((5, 24, 6, 6), 72, (2, 3)),
    ((3, 40, 9, 8), 136, (1, 1, 1)),
    ((2, 64, 12, 11), 128, (2,)),
    ((4, 8, 1, 2), 16, (1, 1, 2)),
]


def far_from_kinks(z: Tensor) -> Tensor:
    """Where float32 and float64 agree on the side of a kink of ReLU, ReLU6 and Hardswish."""
    return torch.stack([(z - kink).abs() > 1e-4 for kink in (-3, 0, 3, 6)]).all(0)


@pytest.mark.parametrize(
    "case, act, dtype", pairwise(SHAPES, ["none", "relu", "relu6", "silu", "hardswish"], DTYPES), ids=str
)
def test_conv1x1_norm_act_equals_plain_operations(case, act, dtype) -> None:
    shape, outputs, groups = case
    x, filters = draw(shape, dtype, 0, offset=0.5), draw((outputs, shape[1], 1, 1), dtype, 1)
    norm = parameters(outputs, 2)
    a, statistics = conv1x1_batch_norm_act(x, filters, norm, groups, act)
    exact, exact_filters, exact_norm = as_float64(x), as_float64(filters), norm_as_float64(norm)
    z, records = plain(F.conv2d(exact, exact_filters), exact_norm, groups)
    expected = reference.ACTIVATION_FUNCTIONS[act](z)
    assert a.is_contiguous(memory_format=torch.channels_last)
    tolerance = TOLERANCE[dtype]
    assert_near(a, expected, tolerance)
    assert_near(statistics[:, :2], records, TOLERANCE[torch.float32])
    da = (draw(a.shape, dtype, 3).detach() * far_from_kinks(z)).contiguous(memory_format=torch.channels_last)
    a.backward(da)
    expected.backward(da.double())
    assert_near(x.grad, exact.grad, tolerance)
    assert_near(filters.grad, exact_filters.grad, tolerance)
    assert_near(norm.weight.grad, exact_norm.weight.grad, tolerance)
    assert_near(norm.bias.grad, exact_norm.bias.grad, tolerance)


def test_a_large_mean_does_not_hide_the_gradients() -> None:
    x, filters = draw((4, 16, 8, 8), torch.float32, 0, offset=30.0), draw((32, 16, 1, 1), torch.float32, 1)
    norm, groups = parameters(32, 2), (4,)
    a, statistics = conv1x1_batch_norm_act(x, filters, norm, groups, "silu")
    exact, exact_filters, exact_norm = as_float64(x), as_float64(filters), norm_as_float64(norm)
    z, records = plain(F.conv2d(exact, exact_filters), exact_norm, groups)
    da = draw(a.shape, torch.float32, 3).detach()
    a.backward(da)
    F.silu(z).backward(da.double())
    assert_near(statistics[:, :2], records, 1e-5)
    for found, expected in ((x, exact), (filters, exact_filters), (norm.weight, exact_norm.weight)):
        assert_near(found.grad, expected.grad, 1e-3)


@pytest.mark.parametrize("act", ["relu6", "silu"])
def test_nan_is_propagated(act: Activation) -> None:
    x, filters = draw((2, 8, 4, 4), torch.float16, 0), draw((16, 8, 1, 1), torch.float16, 1)
    with torch.no_grad():
        x[0, 0, 0, 0] = torch.nan
    norm = parameters(16, 2)
    a, statistics = conv1x1_batch_norm_act(x, filters, norm, (1, 1), act)
    a.backward(draw(a.shape, torch.float16, 3).detach())
    assert x.grad is not None and filters.grad is not None and norm.weight.grad is not None
    assert a[0].isnan().all() and not a[1].isnan().any()
    assert statistics[0].isnan().all() and not statistics[1].isnan().any()
    assert x.grad[0].isnan().all() and not x.grad[1].isnan().any()
    assert filters.grad.isnan().all() and norm.weight.grad.isnan().all()


def test_the_gradient_of_an_input_that_needs_none_is_not_computed() -> None:
    x, filters = draw((2, 8, 4, 4), torch.float16, 0).detach(), draw((16, 8, 1, 1), torch.float16, 1)
    norm = parameters(16, 2)
    a, _ = conv1x1_batch_norm_act(x, filters, norm, (2,), "relu")
    a.backward(draw(a.shape, torch.float16, 3).detach())
    assert x.grad is None and filters.grad is not None and norm.weight.grad is not None


def test_other_convolutions_are_not_supported() -> None:
    x = draw((2, 32, 4, 4), torch.float16, 0)
    assert supports(x, torch.empty(192, 32, 1, 1))
    assert not supports(x.float(), torch.empty(192, 32, 1, 1))  # tensor cores do not multiply float32
    for shape in ((192, 32, 3, 3), (192, 16, 1, 1), (196, 32, 1, 1), (48, 32, 1, 1)):
        assert not supports(x, torch.empty(shape))
    assert not supports(draw((2, 32, 1, 1), torch.float16, 0), torch.empty(192, 32, 1, 1))
    assert not supports(draw((2, 96, 4, 4), torch.float16, 0), torch.empty(576, 96, 1, 1))


def test_the_fused_layers_equal_separate_ones() -> None:
    x, norm = draw((4, 16, 4, 4), torch.float16, 0), FusedBatchNorm2d(64)
    norm.groups = (2, 2)
    conv = nn.Conv2d(16, 64, 1, bias=False).half()
    fused = conv1x1_norm_act(conv, norm, x, nn.SiLU())
    assert "Conv1x1BatchNormAct" in type(fused.grad_fn).__name__
    fused_stats = norm.batch_stats
    exact = NormParams(norm.weight.double(), norm.bias.double(), norm.running_var.double(), norm.eps)  # type: ignore[union-attr]
    z, records = plain(F.conv2d(x.double(), conv.weight.double()), exact, norm.groups)
    assert_near(fused, F.silu(z), TOLERANCE[torch.float16])
    assert_near(torch.stack(fused_stats), records, TOLERANCE[torch.float16])


@pytest.mark.parametrize("change", ["bias", "stride", "padding", "groups", "hook", "eval", "few outputs"])
def test_convolutions_that_are_not_plain_expansions_are_called(change: str) -> None:
    options = {
        "bias": {"bias": True},
        "stride": {"stride": 2},
        "padding": {"padding": 1},
        "groups": {"groups": 2},
        "few outputs": {"out_channels": 24},
    }.get(change, {})
    arguments = {"in_channels": 16, "out_channels": 64, "kernel_size": 1, "bias": False} | options
    conv = nn.Conv2d(**arguments).half()  # type: ignore[arg-type]
    norm = FusedBatchNorm2d(conv.out_channels).train(change != "eval")
    norm.groups = (2,)
    if change == "eval":
        norm.half()
    calls = []
    if change == "hook":
        conv.register_forward_hook(lambda *_: calls.append("hook"))
    y = conv1x1_norm_act(conv, norm, draw((2, 16, 4, 4), torch.float16, 0), nn.ReLU())
    assert "Conv1x1BatchNormAct" not in type(y.grad_fn).__name__
    assert calls == (["hook"] if change == "hook" else [])
