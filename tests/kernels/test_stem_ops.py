"""The stem's convolution over 2x2 blocks of pixels equals the plain one, also with the statistics of its output."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import assert_near, pairwise, parameters
from torch import Tensor

from reconv.kernels import channels_last
from reconv.kernels.channels_last import channel_rows
from reconv.kernels.ops import batch_norm as norm_ops
from reconv.kernels.ops import stem as ops
from reconv.kernels.ops.stem import (
    StemConvTile,
    space_to_depth,
    space_to_depth_weight,
    stem_conv_statistics,
    supports,
    supports_statistics,
)
from reconv.kernels.window import STEM_KERNELS

TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}


@pytest.mark.parametrize(
    "shape, layout, kernel",
    pairwise(
        [(2, 3, 16, 12), (3, 1, 10, 14), (1, 4, 8, 8)], [torch.contiguous_format, torch.channels_last], STEM_KERNELS
    ),
)
def test_space_to_depth_convolution_equals_the_plain_one(shape, layout, kernel) -> None:
    images = torch.randn(*shape).contiguous(memory_format=layout)
    plain = torch.randn(8, shape[1], kernel, kernel, dtype=torch.float64, requires_grad=True)
    weight = plain.detach().clone().requires_grad_()
    assert supports(images, weight)
    y64 = F.conv2d(images.double(), plain, stride=2, padding=kernel // 2)
    y = F.conv2d(space_to_depth(images, kernel, torch.float32).double(), space_to_depth_weight(weight))
    torch.testing.assert_close(y, y64, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y64)
    y.backward(dy)
    y64.backward(dy)
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape, kernel", [((2, 3, 15, 12), 7), ((2, 5, 16, 16), 7), ((2, 3, 16, 16), 5)])
def test_other_convolutions_are_not_supported(shape, kernel) -> None:
    assert not supports(torch.randn(*shape), torch.randn(8, shape[1], kernel, kernel))


def drawn(samples: int, sides: tuple[int, int], outputs: int, kernel: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Blocks of images, and filters whose values the dtype has."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(samples, 3, *sides, generator=generator) + 0.5
    weight = torch.randn(outputs, 3, kernel, kernel, generator=generator).to(dtype).float()
    return space_to_depth(images, kernel, dtype), space_to_depth_weight(weight)


def exact_statistics(y: Tensor, groups: tuple[int, ...], eps: float) -> Tensor:
    """Mean, unbiased variance and 1 / std of each group in float64."""
    parts = [part.transpose(0, 1).flatten(1) for part in y.double().split(groups)]
    found = [[part.mean(1), part.var(1), (part.var(1, correction=0) + eps).rsqrt()] for part in parts]
    return torch.stack([torch.stack(one) for one in found])


@pytest.mark.parametrize(
    "case, kernel, dtype",
    pairwise(
        [((5,), (20, 12), 64), ((2, 3), (12, 18), 24), ((3, 1), (6, 26), 72), ((1,), (4, 4), 8)],
        STEM_KERNELS,
        list(TOLERANCE),
    ),
    ids=str,
)
def test_a_convolution_with_statistics_equals_plain_operations(case, kernel, dtype) -> None:
    groups, sides, outputs = case
    blocks, filters = drawn(sum(groups), sides, outputs, kernel, dtype)
    norm, exact_filters = parameters(outputs, 2), filters.double().requires_grad_()
    y, stats = stem_conv_statistics(blocks, filters.requires_grad_(), norm, groups)
    expected = F.conv2d(blocks.double(), exact_filters)
    assert y.is_contiguous(memory_format=torch.channels_last) and y.dtype == dtype
    assert not stats.requires_grad
    assert_near(y, expected, TOLERANCE[dtype])
    assert_near(stats, exact_statistics(y.detach(), groups, norm.eps), 1e-5)  # of the rounded output
    dy = torch.randn(y.shape).to(dtype).contiguous(memory_format=torch.channels_last)
    y.backward(dy)
    expected.backward(dy.double())
    assert filters.grad is not None and filters.grad.dtype == torch.float32
    assert_near(filters.grad, exact_filters.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("kernel", STEM_KERNELS)
def test_every_number_of_programs_and_tiles_gives_the_statistics_of_a_pass_of_their_own(kernel, monkeypatch) -> None:
    blocks, filters = drawn(7, (14, 22), 40, kernel, torch.float16)
    groups, norm = (3, 4), parameters(40, 2)
    monkeypatch.setattr(channels_last, "_device_limits", lambda device: (3, 0))  # SMs, shared memory
    for config in (StemConvTile(32, 64, 1, 4, 1, 2), StemConvTile(16, 32, 2, 2, 2, 40)):
        y, stats = ops.conv_output(blocks, filters, norm, groups, config)
        assert_near(y, F.conv2d(blocks.double(), filters.double()), 4e-3)
        assert_near(stats, norm_ops.statistics(y, norm, channel_rows(y, groups)).double(), 1e-6)


def test_squares_do_not_cancel_where_the_mean_is_large() -> None:
    blocks = space_to_depth(torch.randn(4, 3, 12, 12) + 100, 3, torch.bfloat16)
    filters = space_to_depth_weight(torch.rand(16, 3, 3, 3) + 0.5)
    blocks = F.pad(blocks[:, :, 1:, 1:], (1, 0, 1, 0), value=100.0)  # no borders, which would not be near the mean
    blocks = blocks.contiguous(memory_format=torch.channels_last)
    norm = parameters(16, 2)
    y, stats = stem_conv_statistics(blocks, filters, norm, (4,))
    exact = exact_statistics(y, (4,), norm.eps)
    assert (exact[:, 0] ** 2 / exact[:, 1]).min() > 100
    torch.testing.assert_close(stats.double(), exact, rtol=1e-5, atol=0)


def test_a_group_of_one_value_keeps_the_running_variance() -> None:
    blocks, filters = drawn(2, (2, 2), 16, 7, torch.float16)
    norm = parameters(16, 2)
    y, stats = stem_conv_statistics(blocks, filters, norm, (1, 1))
    assert torch.equal(stats[:, 1], norm.running_var.expand(2, -1))
    torch.testing.assert_close(stats[:, 0], y[:, :, 0, 0].float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("image", [0, 3])
def test_nan_reaches_the_statistics_of_its_group_alone(image) -> None:
    blocks, filters = drawn(4, (16, 16), 16, 7, torch.float16)
    blocks[image, 3, 5, 5] = float("nan")
    y, stats = stem_conv_statistics(blocks, filters, parameters(16, 2), (2, 2))
    group = image // 2
    assert stats[group].isnan().all() and not stats[1 - group].isnan().any()
    assert y.isnan().sum() == 16 * 16


def test_statistics_need_half_precision_and_whole_vectors_of_outputs() -> None:
    images, weight = torch.empty(2, 3, 8, 8), torch.empty(16, 3, 7, 7)
    assert supports_statistics(images, weight, torch.bfloat16)
    assert not supports_statistics(images, weight, torch.float32)  # tensor cores do not multiply float32
    assert not supports_statistics(images, weight[:12], torch.bfloat16)
    assert not supports_statistics(images, torch.empty(2**27, 3, 7, 7, device="meta"), torch.bfloat16)
