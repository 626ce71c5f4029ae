"""The fused norm, ReLU and max-pool of a stem equal the plain ones, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, TOLERANCE, as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain
from torch import Tensor

from reconv.kernels.ops.norm_max_pool import batch_norm_relu_max_pool
from reconv.kernels.window import STEM_WINDOWS, PoolWindow, same_padding

SHAPES = [((3, 24, 7, 9), (3,)), ((3, 16, 8, 6), (2, 1)), ((2, 72, 2, 5), (2,)), ((2, 8, 37, 35), (1, 1))]
ONE_ROW = ((2, 72, 1, 5), (2,))  # too small for a window without padding


def plain_pool(x: Tensor, window: PoolWindow) -> Tensor:
    if window.pad != "same":
        return F.max_pool2d(x, window.side, window.stride, window.pad, ceil_mode=window.ceil)
    ends = [same_padding(side, window.side, window.stride) for side in (x.shape[3], x.shape[2])]
    return F.max_pool2d(F.pad(x, (*ends[0], *ends[1]), value=-torch.inf), window.side, window.stride)


@pytest.mark.parametrize(
    "case, uses, dtype, window",
    [
        *pairwise(SHAPES, [1, 2], DTYPES, STEM_WINDOWS),
        *((ONE_ROW, 1, torch.float32, window) for window in STEM_WINDOWS if window.pad != 0),
    ],
    ids=str,
)
def test_norm_relu_max_pool_equals_the_reference(case, uses, dtype, window) -> None:
    shape, groups = case
    x, of = draw(shape, dtype, 1), parameters(shape[1], 2)
    x64, of64 = as_float64(x), norm_as_float64(of)
    first, second, stats = batch_norm_relu_max_pool(x, of, groups, window)
    z64, recorded = plain(x64, of64, groups)
    y64 = plain_pool(F.relu(z64), window)
    assert first.is_contiguous(memory_format=torch.channels_last)
    assert_near(first, y64, TOLERANCE[dtype])
    assert_near(stats[:, :2], recorded, 2e-5)
    gradients = [torch.randn_like(first) for _ in range(uses)]
    torch.autograd.backward([first, second][:uses], gradients)
    y64.backward(torch.stack([g.double() for g in gradients]).sum(0))
    assert_near(x.grad, x64.grad, TOLERANCE[dtype])
    assert_near(of.weight.grad, of64.weight.grad, TOLERANCE[dtype])
    assert_near(of.bias.grad, of64.bias.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("window", STEM_WINDOWS, ids=str)
def test_ties_in_a_window_go_to_the_first_value(window) -> None:
    x = torch.zeros(1, 8, 4, 4).contiguous(memory_format=torch.channels_last)
    x[:, :, 1:3, 1:3] = 1.0
    x.requires_grad_()
    of = parameters(8, 2)
    y, _, _ = batch_norm_relu_max_pool(x, of, (1,), window)
    y.sum().backward()
    x64, of64 = as_float64(x), norm_as_float64(of)
    plain_pool(F.relu(plain(x64, of64, (1,))[0]), window).sum().backward()
    assert_near(x.grad, x64.grad, 1e-5)


@pytest.mark.parametrize("window", STEM_WINDOWS, ids=str)
def test_of_a_channel_with_weight_zero_the_first_value_wins(window) -> None:
    """All of its normalized values are equal, and the weight's gradient depends on which of them has the gradient."""
    x, of = draw((2, 8, 7, 6), torch.float32, 1), parameters(8, 2)
    with torch.no_grad():
        of.weight[::2], of.bias[::2] = 0.0, 1.0
    y, _, _ = batch_norm_relu_max_pool(x, of, (2,), window)
    x64, of64 = as_float64(x), norm_as_float64(of)
    y64 = plain_pool(F.relu(plain(x64, of64, (2,))[0]), window)
    dy = torch.randn_like(y)
    y.backward(dy)
    y64.backward(dy.double())
    assert_near(of.weight.grad, of64.weight.grad, 1e-5)
    assert_near(x.grad, x64.grad, 1e-5)
