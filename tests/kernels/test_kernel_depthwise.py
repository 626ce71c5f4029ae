"""The depthwise convolution equals torch's, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, assert_near, draw, wide

from reconv.kernels.depthwise import depthwise

# Odd sides, several tiles, channels that are no power of two, a picture smaller than the kernel.
CASES = [
    ((2, 16, 8, 8), 3, 1),
    ((2, 16, 9, 9), 3, 2),
    ((1, 24, 7, 7), 5, 1),
    ((2, 8, 5, 19), 5, 2),
    ((1, 72, 3, 3), 3, 2),
    ((1, 8, 1, 1), 3, 1),
    ((1, 8, 6, 6), 7, 2),
]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("shape", "kernel", "stride"), CASES, ids=str)
def test_depthwise_equals_torch(shape: tuple[int, ...], kernel: int, stride: int, dtype: torch.dtype) -> None:
    x = draw(shape, dtype, seed=1)
    weight = torch.randn(shape[1], 1, kernel, kernel, generator=torch.Generator().manual_seed(2)).requires_grad_()
    # The weight is rounded to the images' type, as under autocast; its gradient is not.
    exact_x, exact_weight = wide(x), wide(weight.detach().to(dtype))
    y = depthwise(x, weight, stride)
    expected = F.conv2d(exact_x, exact_weight, stride=stride, padding=kernel // 2, groups=shape[1])
    assert y.dtype == dtype and y.shape == expected.shape
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert_near(y, expected, TOLERANCE[dtype])

    dy = draw(tuple(y.shape), dtype, seed=3).detach()
    y.backward(dy)
    expected.backward(dy.double())
    assert weight.grad is not None and weight.grad.dtype == torch.float32
    assert_near(x.grad, exact_x.grad, TOLERANCE[dtype])
    assert_near(weight.grad, exact_weight.grad, TOLERANCE[torch.float32])


def test_only_the_gradients_that_are_wanted_are_computed() -> None:
    x = draw((1, 8, 4, 4), torch.float32, seed=1).detach()
    weight = torch.ones(8, 1, 3, 3, requires_grad=True)
    depthwise(x, weight, 1).sum().backward()
    assert x.grad is None and weight.grad is not None
