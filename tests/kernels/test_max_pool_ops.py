"""The max-pool equals torch's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, alternate, draw
from torch import nn

from reconv.kernels.fused.layers import FusedMaxPool2d, FusedSameMaxPool2d
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops import pointwise
from reconv.kernels.ops.max_pool import max_pool, max_pool_and_input, max_pool_inference
from reconv.kernels.window import PoolWindow
from reconv.models.layers.conv import SameMaxPool2d

# GoogLeNet's pools, ResNet's, odd sides, channels that are no power of two, an image of one pixel, FastNet's pools
# (which leave out the last row and column), windows with gaps between them.
CASES = [
    ((2, 24, 7, 7), PoolWindow(3, 1, 1, True)),
    ((1, 8, 8, 19), PoolWindow(3, 2, 0, True)),
    ((2, 72, 9, 6), PoolWindow(2, 2, 0, True)),
    ((1, 64, 8, 8), PoolWindow(3, 2, 1, False)),
    ((1, 8, 1, 1), PoolWindow(3, 1, 1, False)),
    ((2, 24, 8, 7), PoolWindow(3, 2, "same")),
    ((1, 8, 5, 6), PoolWindow(2, 2, "same")),
    ((2, 64, 31, 31), PoolWindow(2, 2, 0)),
    ((2, 72, 15, 7), PoolWindow(2, 2, 0)),
    ((1, 8, 11, 9), PoolWindow(2, 3, 1)),
    ((1, 8, 35, 18), PoolWindow(3, 1, 1)),  # several strips of columns and of lines
    ((1, 8, 70, 34), PoolWindow(3, 2, 1)),
    ((1, 8, 6, 7), PoolWindow(3, 1, 0)),
    ((1, 8, 7, 6), PoolWindow(5, 2, 2)),
]


@pytest.mark.parametrize(("shape", "window", "dtype"), alternate(CASES, DTYPES), ids=str)
def test_max_pool_equals_torchs(shape: tuple[int, ...], window: PoolWindow, dtype: torch.dtype) -> None:
    x = draw(shape, dtype, seed=1)
    with torch.no_grad():
        x.mul_(2).round_()  # many equal values: which of them wins is tested too
    plain = x.detach().clone().requires_grad_()
    if window.pad == "same":
        expected = SameMaxPool2d(window.side, window.stride)(plain)
    else:
        expected = F.max_pool2d(plain, window.side, window.stride, window.pad, ceil_mode=window.ceil)
    y = max_pool(x, window)
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(y, expected)
    values = max_pool_inference(x.detach(), window)
    assert torch.equal(values, expected) and values.stride() == y.stride()
    dy = draw(tuple(y.shape), torch.float32, seed=2).detach().round().to(dtype)  # integers are summed exactly
    y.backward(dy)
    expected.backward(dy)
    assert torch.equal(x.grad, plain.grad)


@pytest.mark.parametrize(("shape", "window", "dtype"), alternate(CASES[:3], DTYPES), ids=str)
def test_max_pool_adds_the_gradient_of_another_use(
    shape: tuple[int, ...], window: PoolWindow, dtype: torch.dtype
) -> None:
    x = draw(shape, dtype, seed=1)
    y, again = max_pool_and_input(x, window)
    assert torch.equal(y, max_pool(x, window)) and again.data_ptr() == x.data_ptr()
    dy, other = (draw(tuple(t.shape), torch.float32, seed=2).detach().round().to(dtype) for t in (y, x))
    (pooled,) = torch.autograd.grad(max_pool(x, window), x, dy)
    (both,) = torch.autograd.grad((y, again), x, (dy, other.contiguous()), retain_graph=True)
    assert torch.equal(both, pooled + other)  # integers are summed exactly
    assert torch.equal(torch.autograd.grad(y, x, dy, retain_graph=True)[0], pooled)
    assert torch.equal(torch.autograd.grad(again, x, other)[0], other)


def test_nan_is_propagated_and_minus_infinity_is_a_value() -> None:
    x = draw((1, 8, 4, 4), torch.float32, seed=1).detach()
    x[0, 0, 1, 1] = torch.nan
    x[0, 1] = -torch.inf
    window = PoolWindow(3, 1, 1, False)
    expected = F.max_pool2d(x, 3, 1, 1)
    assert torch.equal(max_pool(x, window).isnan(), expected.isnan())
    torch.testing.assert_close(max_pool_inference(x, window), expected, rtol=0, atol=0, equal_nan=True)
    x.requires_grad_()
    max_pool(x, window).nan_to_num(0, 0, 0)[0, 1].sum().backward()
    assert x.grad is not None and torch.isfinite(x.grad).all()


@pytest.mark.parametrize("window", [PoolWindow(2, 2, 0), PoolWindow(3, 2, 1), PoolWindow(3, 1, 1)], ids=str)
def test_the_gradient_of_a_nan_goes_where_torchs_does(window: PoolWindow) -> None:
    x = draw((2, 8, 7, 7), torch.float16, seed=1).detach().round()
    x[:, 0, 2, 2:4] = torch.nan  # two in a window: the last of them wins
    x[:, 1, :4] = torch.nan
    x[:, 2, 1, 1] = torch.inf
    x[:, 3, :4] = -torch.inf
    x, plain = (x.clone(memory_format=torch.preserve_format).requires_grad_() for _ in range(2))
    y, expected = max_pool(x, window), F.max_pool2d(plain, window.side, window.stride, int(window.pad))
    torch.testing.assert_close(y, expected, rtol=0, atol=0, equal_nan=True)
    dy = draw(tuple(y.shape), torch.float32, seed=2).detach().round().half()
    y.backward(dy)
    expected.backward(dy)
    assert x.grad is not None and plain.grad is not None
    assert torch.equal(x.grad, plain.grad) and x.grad.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("channels", [8, 5])  # the second is not supported
def test_inference_max_pool_equals_torchs(channels: int) -> None:
    x = draw((2, channels, 9, 6), torch.float32, seed=1).detach()
    assert torch.equal(pointwise.max_pool(x, 3, 2, 1, True), F.max_pool2d(x, 3, 2, 1, ceil_mode=True))


def test_max_pool_falls_back_to_torch_beyond_the_launch_grid() -> None:
    x = draw((65536, 8, 1, 2), torch.float16, seed=1).detach()
    assert torch.equal(pointwise.max_pool(x, 2, 1, 1, False), F.max_pool2d(x, 2, 1, 1))


@pytest.mark.parametrize("pool", [FusedMaxPool2d(2, 2), FusedSameMaxPool2d(2, 2)])
@pytest.mark.parametrize(
    ("shape", "num_kernels"), [((65535, 8, 4, 4), 2), ((65536, 8, 4, 4), 0), ((1, 8, 8, 524288), 0)]
)
def test_a_layer_beyond_the_launch_grid_uses_torch(pool: nn.Module, shape: tuple[int, ...], num_kernels: int) -> None:
    x = torch.empty(shape, device="meta").contiguous(memory_format=torch.channels_last).requires_grad_()
    with trace_launches() as noted:
        pool(x).sum().backward()
    assert len(noted) == num_kernels
