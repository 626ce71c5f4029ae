"""The depthwise convolution equals torch's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, TOLERANCE, as_float64, assert_near, draw, pairwise

from reconv.kernels.depthwise.ops import depthwise_conv
from reconv.kernels.jit.launch import trace_launches


@pytest.mark.parametrize("shape, kernel", [((2, 24, 9, 7), 3), ((3, 8, 1, 1), 5), ((1, 16, 2, 13), 7)], ids=str)
def test_stride_1_equals_torchs(shape: tuple[int, ...], kernel: int) -> None:
    draw = torch.Generator().manual_seed(kernel)
    x = torch.randn(shape, generator=draw, dtype=torch.float64).contiguous(memory_format=torch.channels_last)
    weight = torch.randn(shape[1], 1, kernel, kernel, generator=draw, dtype=torch.float64)
    dy = torch.randn(shape, generator=draw, dtype=torch.float64)
    results = []
    for convolve in (depthwise_conv, lambda x, w: F.conv2d(x, w, padding=kernel // 2, groups=shape[1])):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        y = convolve(*leaves)
        y.backward(dy)
        results.append((y, *(leaf.grad for leaf in leaves)))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "shape, kernel, dtype",
    pairwise([(2, 24, 9, 7), (3, 8, 1, 1), (1, 72, 4, 6), (2, 16, 2, 13)], [3, 5, 7], DTYPES),
    ids=str,
)
def test_stride_2_equals_torchs(shape: tuple[int, ...], kernel: int, dtype: torch.dtype) -> None:
    x, weight = draw(shape, dtype, 0), draw((shape[1], 1, kernel, kernel), dtype, 1)
    y = depthwise_conv(x, weight, 2)
    exact = as_float64(x), as_float64(weight)
    expected = F.conv2d(*exact, stride=2, padding=kernel // 2, groups=shape[1])
    assert_near(y, expected, TOLERANCE[dtype])
    dy = draw(y.shape, dtype, 2)
    y.backward(dy)
    expected.backward(dy.double())
    for leaf, exactly in zip((x, weight), exact, strict=True):
        assert_near(leaf.grad, exactly.grad, TOLERANCE[dtype])


def test_frozen_weights_and_inputs_without_grad_get_no_gradient() -> None:
    x, weight = torch.randn(2, 8, 5, 5), torch.randn(8, 1, 3, 3)
    for needs_grad in ((True, False), (False, True)):
        leaves = x.clone().requires_grad_(needs_grad[0]), weight.clone().requires_grad_(needs_grad[1])
        depthwise_conv(*leaves).sum().backward()
        assert [leaf.grad is not None for leaf in leaves] == list(needs_grad)


def test_large_batches_fit_into_a_launch_grid() -> None:
    """MobileNetV2's first layer of stride 2, of as many images as kernels count."""
    x = torch.empty(1783, 96, 112, 112, dtype=torch.bfloat16, device="meta", requires_grad=True)
    weight = torch.empty(96, 1, 3, 3, dtype=torch.bfloat16, device="meta")
    with trace_launches() as noted:
        depthwise_conv(x.contiguous(memory_format=torch.channels_last), weight, 2).sum().backward()
    assert [variant.kernel.__name__ for variant in noted] == ["input_gradient"]
