"""The depthwise convolution equals torch's, values and gradients."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, TOLERANCE, as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain

from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops.depthwise import (
    CONV,
    WEIGHT_GRADIENT,
    StripTile,
    conv_and_statistics,
    conv_output,
    depthwise_conv,
    depthwise_conv_statistics,
    supports_kernels,
    weight_gradient,
)

HALF_TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 1.6e-2}


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


# Lines of 7, 4 and an odd number of columns, images of one pixel, of fewer lines than the kernel, and many programs.
@pytest.mark.parametrize(
    "shape, kernel, stride, dtype, config",
    pairwise(
        [(2, 24, 9, 7), (3, 8, 1, 1), (1, 72, 4, 6), (2, 16, 2, 13), (3, 16, 5, 14)],
        [3, 5],
        [1, 2],
        [torch.float16, torch.bfloat16],
        [StripTile(7, 2, 1, 1), StripTile(4, 4, 1, 3), StripTile(7, 2, 1, 1000)],
    ),
    ids=str,
)
def test_output_and_weight_gradient_of_kernels_equal_torchs(
    shape: tuple[int, ...], kernel: int, stride: int, dtype: torch.dtype, config: StripTile
) -> None:
    x, weight = draw(shape, dtype, 0), draw((shape[1], 1, kernel, kernel), dtype, 1)
    exact = as_float64(x), as_float64(weight)
    expected = F.conv2d(*exact, stride=stride, padding=kernel // 2, groups=shape[1])
    dy = draw(expected.shape, dtype, 2).detach()
    expected.backward(dy.double())
    x, weight = x.detach(), weight.detach().contiguous()
    found = conv_output(x, weight, stride, config), weight_gradient(dy, x, weight, stride, config)
    for value, exactly in zip(found, (expected, exact[1].grad), strict=True):
        assert value.dtype == dtype
        assert_near(value, exactly, HALF_TOLERANCE[dtype])


@pytest.mark.parametrize(
    "shape, dtype, config",
    pairwise(
        [(2, 24, 9, 7), (3, 8, 1, 1), (1, 72, 4, 6), (2, 16, 5, 14)],
        [torch.float16, torch.bfloat16],
        [CONV[7, 1], StripTile(4, 2, 1, 1000)],
    ),
    ids=str,
)
def test_kernels_of_7x7_with_a_bias_equal_torchs(
    shape: tuple[int, ...], dtype: torch.dtype, config: StripTile, monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in (CONV, WEIGHT_GRADIENT):
        monkeypatch.setitem(table, (7, 1), config)
    bias = torch.linspace(-2, 2, shape[1], dtype=dtype, requires_grad=True)
    leaves = draw(shape, dtype, 0), draw((shape[1], 1, 7, 7), dtype, 1), bias
    exact = [as_float64(leaf) for leaf in leaves]
    x, weight, _ = leaves
    assert supports_kernels(x, weight, 1) and not supports_kernels(x, weight, 2)
    y, expected = depthwise_conv(x, weight, 1, bias), F.conv2d(*exact, padding=3, groups=shape[1])
    dy = draw(shape, dtype, 3).detach()
    y.backward(dy)
    expected.backward(dy.double())
    assert_near(y, expected, HALF_TOLERANCE[dtype])
    for leaf, exactly in zip(leaves, exact, strict=True):
        assert_near(leaf.grad, exactly.grad, HALF_TOLERANCE[dtype])


@pytest.mark.parametrize("kernel, stride, dtype", pairwise([3, 5], [1, 2], [torch.float16, torch.bfloat16]), ids=str)
def test_a_convolution_in_half_precision_uses_the_kernels(kernel: int, stride: int, dtype: torch.dtype) -> None:
    x, weight = draw((2, 24, 6, 7), dtype, 0), draw((24, 1, kernel, kernel), dtype, 1)
    exact = as_float64(x), as_float64(weight)
    y = depthwise_conv(x, weight, stride)
    dy = draw(y.shape, dtype, 2).detach()
    y.backward(dy)
    F.conv2d(*exact, stride=stride, padding=kernel // 2, groups=24).backward(dy.double())
    x_grad, filters = exact[0].grad, weight.detach().contiguous()
    config = CONV[kernel, stride]
    assert torch.equal(y, conv_output(x.detach(), filters, stride, config))
    assert weight.grad is not None and torch.equal(
        weight.grad, weight_gradient(dy, x.detach(), filters, stride, WEIGHT_GRADIENT[kernel, stride])
    )
    assert_near(x.grad, x_grad, HALF_TOLERANCE[dtype])


@pytest.mark.parametrize(
    "groups, height, kernel, stride, splits, offset",
    pairwise([(5,), (2, 3), (1, 1, 3)], [1, 2, 3, 4, 6], [3, 5], [1, 2], [1, 1000], [0.0, 300.0]),
    ids=str,
)
def test_the_statistics_are_those_of_the_output(
    groups: tuple[int, ...], height: int, kernel: int, stride: int, splits: int, offset: float
) -> None:
    """Also where the mean is much larger than the standard deviation, and where windows reach beyond all lines."""
    x = draw((sum(groups), 24, height, 9), torch.float16, 0, offset).detach()
    weight = draw((24, 1, kernel, kernel), torch.float16, 1).detach().contiguous() / kernel**2
    if offset:  # the padding of windows with lines above and below would raise the standard deviation
        weight = torch.zeros_like(weight)
        weight[..., kernel // 2, kernel // 2] = 1
        if height == 1:
            weight[..., :, kernel // 2] = 1  # of which the padding takes all but one
    norm = parameters(24, 2)
    y, stats = conv_and_statistics(x, weight, stride, norm, groups, StripTile(4, 2, 1, splits))
    assert torch.equal(y, conv_output(x, weight, stride, CONV[kernel, stride]))
    _, expected = plain(y.double(), norm_as_float64(norm), groups)
    torch.testing.assert_close(stats[:, :2].double(), expected, rtol=2e-5, atol=1e-5)
    rstd = torch.stack([(part.double().var((0, 2, 3), correction=0) + norm.eps).rsqrt() for part in y.split(groups)])
    torch.testing.assert_close(stats[:, 2].double(), rstd, rtol=2e-5, atol=0)


@pytest.mark.parametrize("stride", [1, 2])
def test_the_statistics_have_no_gradient_and_the_output_has(stride: int) -> None:
    x, weight = draw((2, 8, 5, 7), torch.float16, 0), draw((8, 1, 3, 3), torch.float16, 1)
    y, stats = depthwise_conv_statistics(x, weight, stride, parameters(8, 2), (2,))
    assert not stats.requires_grad
    y.sum().backward()
    expected = x.grad, weight.grad
    x.grad = weight.grad = None
    depthwise_conv(x, weight, stride).sum().backward()
    assert all(torch.equal(a, b) for a, b in zip(expected, (x.grad, weight.grad), strict=True))


def test_a_second_derivative_is_refused() -> None:
    x, weight = draw((2, 8, 5, 7), torch.float16, 0), draw((8, 1, 3, 3), torch.float16, 1)
    (dx,) = torch.autograd.grad(depthwise_conv(x, weight).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.square().sum().backward()


@pytest.mark.parametrize("dtype, kernel", [(torch.float32, 3), (torch.float16, 9)], ids=str)
def test_other_convolutions_are_left_to_cudnn(dtype: torch.dtype, kernel: int) -> None:
    x, weight = draw((1, 8, 5, 5), dtype, 0), draw((8, 1, kernel, kernel), dtype, 1)
    assert not supports_kernels(x, weight, 1)
    assert supports_kernels(x.half(), weight[..., :3, :3].half(), 1)


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
    assert [variant.kernel.__name__ for variant in noted] == ["conv", "input_gradient"]
