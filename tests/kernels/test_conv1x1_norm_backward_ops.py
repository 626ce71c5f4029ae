"""The backward pass of a 1x1 convolution that includes that of the norm behind it equals separate operations."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain
from torch import Tensor

from reconv.kernels.channels_last import channel_rows
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.ops import conv1x1_norm_backward as ops
from reconv.kernels.ops.batch_norm import NormInput, statistics
from reconv.kernels.ops.conv1x1_norm_backward import (
    BackwardTile,
    conv1x1_before_norm,
    gradients,
    norm_relu_conv1x1_before_norm,
)
from reconv.kernels.ops.sum_conv1x1 import batch_norm_add_relu_conv1x1

DTYPE, TOLERANCE = torch.float16, 4e-3
HALF = {DTYPE: TOLERANCE, torch.bfloat16: 3e-2}
OUTPUTS, INPUTS = 64, 16  # fewer than in use: the interpreter is slow
CASES = [((2, 4, 4), (2,)), ((5, 7, 6), (2, 3)), ((3, 9, 5), (1, 1, 1))]  # images, height, width; groups


@pytest.fixture(autouse=True, params=[None, 32], ids=["all channels", "blocks of channels"])
def few_channels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    tile = BackwardTile(32, 4, 2, 2)
    tiles = {True: replace(tile, block=request.param), False: tile}
    monkeypatch.setattr(ops, "CONFIGS", {(OUTPUTS, INPUTS, has_norm): tile for has_norm, tile in tiles.items()})


def given_norm(x: Tensor, num_groups: int, seed: int) -> NormInput:
    """A norm whose statistics are not those of x, which the gradients' formulas do not assume."""
    generator = torch.Generator().manual_seed(seed)
    stats = torch.rand(num_groups, 3, x.shape[1], generator=generator) + 0.5
    of = parameters(x.shape[1], seed)
    return NormInput(x, stats, of.weight.detach(), of.bias.detach())


def per_sample(values: Tensor, groups: tuple[int, ...]) -> Tensor:
    """[groups, channels] as one number for each sample and channel [n, channels, 1, 1], in float64."""
    return values.double().repeat_interleave(torch.tensor(groups), 0)[:, :, None, None]


@pytest.mark.usefixtures("bfloat16_products")
@pytest.mark.parametrize("case, has_norm, dtype", pairwise(CASES, [True, False], list(HALF)), ids=str)
def test_gradients_equal_their_formulas(case, has_norm, dtype) -> None:
    (num_images, height, width), groups = case
    dz, y = (draw((num_images, OUTPUTS, height, width), dtype, seed).detach() for seed in (0, 1))
    x = draw((num_images, INPUTS, height, width), dtype, 2).detach()
    filters = draw((OUTPUTS, INPUTS, 1, 1), dtype, 3).detach().contiguous()
    behind, before = given_norm(y, len(groups), 4), given_norm(x, len(groups), 5)
    scale = per_sample(before.stats[:, 2], groups) * before.weight.double()[:, None, None]
    z = (x.double() - per_sample(before.stats[:, 0], groups)) * scale + before.bias.double()[:, None, None]
    sums, slope_sums = 10 * torch.randn(2, len(groups), OUTPUTS, generator=torch.Generator().manual_seed(6))
    used = F.relu(z).to(dtype) if has_norm else x
    found, dfilters, found_sums = gradients(
        dz, (behind, sums, slope_sums), before if has_norm else x, filters, channel_rows(x, groups), used
    )

    count = torch.tensor([n * height * width for n in groups])[:, None]
    mean, _, rstd = (per_sample(part, groups) for part in behind.stats.unbind(1))
    xhat = (y.double() - mean) * rstd
    inner = dz.double() - per_sample(sums / count, groups) - xhat * per_sample(slope_sums / count, groups)
    dy = (rstd * behind.weight.double()[:, None, None] * inner).to(dtype).double()
    expected = F.conv_transpose2d(dy, filters.double()).to(dtype).double()
    if has_norm:
        expected *= z > 0
        x_hat = (x.double() - per_sample(before.stats[:, 0], groups)) * per_sample(before.stats[:, 2], groups)
        for number, value in enumerate((expected, expected * x_hat)):
            of_groups = [part.sum((0, 2, 3)) for part in value.split(groups)]
            assert_near(found_sums[number], torch.stack(of_groups), HALF[dtype])
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert_near(found, expected, HALF[dtype])
    assert_near(dfilters.flatten(1), torch.einsum("nohw,nihw->oi", dy, used.double()), HALF[dtype])


@pytest.mark.parametrize("sides, groups", CASES, ids=str)
def test_the_convolution_and_its_statistics_equal_plain_operations(sides, groups) -> None:
    num_images, height, width = sides
    x, norm = draw((num_images, INPUTS, height, width), DTYPE, 0, 0.5), parameters(INPUTS, 1)
    filters, next_norm = draw((OUTPUTS, INPUTS, 1, 1), DTYPE, 2), parameters(OUTPUTS, 3)
    found, x_stats = norm_relu_conv1x1_before_norm(x, norm, filters, next_norm, groups)
    expected, records = plain(as_float64(x), norm_as_float64(norm), groups)
    expected = F.conv2d(F.relu(expected), filters.double())
    assert_near(x_stats[:, :2], records, 1e-4)
    assert_near(found.y, expected, TOLERANCE)
    assert_near(found.stats, statistics(found.y, next_norm, channel_rows(found.y, groups)).double(), 1e-4)
    found.y.backward(torch.ones_like(found.y))  # an ordinary gradient: nothing was left to the convolution
    expected_grad = torch.autograd.grad(expected.sum(), filters)[0]
    assert_near(filters.grad, expected_grad.double(), TOLERANCE)


def chain(deferred: bool, other_deferred: bool, has_shortcut_conv: bool) -> list[Tensor]:
    """Gradients of a bottleneck's end and the next one's beginning."""
    groups, shape = (2, 1), (3, INPUTS, 5, 4)
    x, source = draw(shape, DTYPE, 0), draw(shape, DTYPE, 1)
    filters, other_filters = (draw((OUTPUTS, INPUTS, 1, 1), DTYPE, seed) for seed in (2, 3))
    next_filters = draw((INPUTS, OUTPUTS, 1, 1), DTYPE, 4)
    norms = [parameters(channels, seed) for channels, seed in ((INPUTS, 5), (OUTPUTS, 6), (OUTPUTS, 7))]
    last, _ = norm_relu_conv1x1_before_norm(x, norms[0], filters, norms[1], groups)
    other = ConvOutput(F.conv2d(source, other_filters))
    if has_shortcut_conv:
        other = conv1x1_before_norm(source, other_filters, norms[2], groups)
    last = last if deferred else replace(last, deferred=None)
    other = other if other_deferred else replace(other, deferred=None)
    y, again, *_ = batch_norm_add_relu_conv1x1(
        last, norms[1], other, norms[2] if has_shortcut_conv else None, next_filters, groups
    )
    dy, second = draw(y.shape, DTYPE, 8).detach(), draw(again.shape, DTYPE, 9).detach()
    leaves = [x, source, filters, other_filters, next_filters, *(p for n in norms[:2] for p in (n.weight, n.bias))]
    if has_shortcut_conv:
        leaves += [norms[2].weight, norms[2].bias]
    return list(torch.autograd.grad([y, again], leaves, [dy, second]))


@pytest.mark.parametrize(
    "deferred, other_deferred, has_shortcut_conv",
    [(True, False, False), (True, True, True), (True, False, True), (False, True, True)],
)
def test_a_deferred_gradient_is_that_of_separate_kernels(
    deferred, other_deferred, has_shortcut_conv, monkeypatch
) -> None:
    expected = chain(False, False, has_shortcut_conv)
    calls = []
    monkeypatch.setattr(ops, "gradients", lambda *args: calls.append(args) or gradients(*args))
    found = chain(deferred, other_deferred, has_shortcut_conv)
    assert len(calls) == deferred + other_deferred
    for value, exact in zip(found, expected, strict=True):
        assert value.dtype == exact.dtype
        assert_near(value, exact.double(), TOLERANCE)


def test_filters_that_need_no_gradient_get_none(monkeypatch) -> None:
    wanted = []
    conv_gradients = ops._conv_gradients
    monkeypatch.setattr(ops, "_conv_gradients", lambda *args: wanted.append(args[-1]) or conv_gradients(*args))
    x, norm, next_norm = draw((2, INPUTS, 4, 4), DTYPE, 0), parameters(INPUTS, 1), parameters(OUTPUTS, 2)
    filters = draw((OUTPUTS, INPUTS, 1, 1), DTYPE, 3).detach()
    found, _ = norm_relu_conv1x1_before_norm(x, norm, filters, next_norm, (2,))
    found.y.sum().backward()
    conv1x1_before_norm(x, filters, next_norm, (2,)).y.sum().backward()
    assert [tuple(flags) for flags in wanted] == [(True, False), (True, False)] and x.grad is not None


def test_what_is_not_supported() -> None:
    filters = torch.empty(OUTPUTS, INPUTS, 1, 1)

    def images(num: int, dtype: torch.dtype = DTYPE) -> Tensor:
        return torch.empty(num, INPUTS, 8, 8, dtype=dtype, device="meta")

    assert ops.supports(images(2), filters, True) and ops.supports(images(2), filters, False)
    assert not ops.supports(images(2**19), filters, True), "the output has more than 2**31 values"
    assert not ops.supports(images(2, torch.float32), filters, True)
    assert not ops.supports(images(2), torch.empty(2 * OUTPUTS, INPUTS, 1, 1), True)
