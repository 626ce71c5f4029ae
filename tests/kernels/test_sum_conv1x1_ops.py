"""A residual sum fused with the 1x1 convolution that reads it equals plain operations, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain

from reconv.kernels.channels_last import channel_rows
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.ops import sum_conv1x1 as ops
from reconv.kernels.ops.batch_norm import batch_norm_add_act, batch_norm_add_norm_act, statistics
from reconv.kernels.ops.sum_conv1x1 import SumConvTile, SumForwardTile, batch_norm_add_relu_conv1x1, supports

# One tile, several tiles and groups, blocks of channels and tiles of rows that are not full, few and many outputs.
SHAPES = [
    ((2, 64, 4, 4), 64, (2,)),
    ((5, 128, 7, 6), 24, (2, 3)),
    ((4, 184, 9, 8), 72, (2, 2)),
    ((3, 320, 5, 5), 136, (1, 1, 1)),
    ((2, 256, 3, 3), 256, (2,)),
]
CONFIGS = [None, SumConvTile(128, 64, 4, 2, 2), SumConvTile(64, 256, 8, 2, 1)]
TOLERANCE = {torch.float16: 4e-3, torch.bfloat16: 3e-2}
pytestmark = pytest.mark.usefixtures("bfloat16_products")


def inputs(shape, outputs, dtype, has_norm):  # type: ignore[no-untyped-def]
    x, other = draw(shape, dtype, 0, 0.5), draw(shape, dtype, 1)
    filters = draw((outputs, shape[1], 1, 1), dtype, 2)
    return x, parameters(shape[1], 3), other, parameters(shape[1], 4) if has_norm else None, filters


@pytest.mark.parametrize(
    "case, dtype, has_norm, config", pairwise(SHAPES, list(TOLERANCE), [False, True], CONFIGS), ids=str
)
def test_sum_conv1x1_equals_plain_operations(case, dtype, has_norm, config, monkeypatch) -> None:
    if config is not None:
        monkeypatch.setattr(ops, "CONFIGS", dict.fromkeys(ops.CONFIGS, config))
    shape, outputs, groups = case
    x, norm, other, other_norm, filters = inputs(shape, outputs, dtype, has_norm)
    y, shortcut, own_statistics, other_statistics, conv_statistics = batch_norm_add_relu_conv1x1(
        ConvOutput(x), norm, ConvOutput(other), other_norm, filters, groups
    )
    assert conv_statistics is None  # nobody asked for them
    exact, exact_norm, exact_other = as_float64(x), norm_as_float64(norm), as_float64(other)
    exact_filters = as_float64(filters)
    z, records = plain(exact, exact_norm, groups)
    if other_norm is None:
        z, leaves, exact_leaves = z + exact_other, [], []
        assert other_statistics is None
    else:
        exact_other_norm = norm_as_float64(other_norm)
        added, other_records = plain(exact_other, exact_other_norm, groups)
        z = z + added
        leaves = [other_norm.weight, other_norm.bias]
        exact_leaves = [exact_other_norm.weight, exact_other_norm.bias]
        assert_near(other_statistics[:, :2], other_records, 1e-4)
    assert_near(own_statistics[:, :2], records, 1e-4)
    expected_shortcut = F.relu(z)
    expected = F.conv2d(expected_shortcut, exact_filters)
    assert y.is_contiguous(memory_format=torch.channels_last)
    tolerance = TOLERANCE[dtype]
    assert_near(y, expected, tolerance)
    assert_near(shortcut, expected_shortcut, tolerance)
    # Without values near the kink, where a last bit decides the gradient.
    far = (z.abs() > 0.01).to(dtype)
    dy, second = draw(y.shape, dtype, 5).detach(), draw(shape, dtype, 6).detach()
    hook = far.contiguous(memory_format=torch.channels_last)
    product = F.conv_transpose2d(dy.double(), exact_filters.detach()).to(dtype)  # rounded, as a convolution's output
    torch.autograd.backward([y, shortcut], [dy, second * hook - product * (1 - hook)])
    total = (product.double() + (second * hook - product * (1 - hook)).double()).to(dtype).double() * hook
    expected_shortcut.backward(total.contiguous(memory_format=torch.channels_last))
    leaves = [x, norm.weight, norm.bias, other, *leaves]
    exact_leaves = [exact, exact_norm.weight, exact_norm.bias, exact_other, *exact_leaves]
    for leaf, exact_leaf in zip(leaves, exact_leaves, strict=True):
        assert_near(leaf.grad, exact_leaf.grad, tolerance)
    if other_norm is not None:
        assert norm.bias.grad.data_ptr() != other_norm.bias.grad.data_ptr(), "equal, but not the same memory"
    weight_grad = torch.einsum("nohw,nihw->oi", dy.double(), expected_shortcut.detach())
    assert_near(filters.grad.flatten(1), weight_grad, tolerance)


@pytest.mark.parametrize("uses", ["both", "first", "second"])
@pytest.mark.parametrize("has_norm", [False, True])
def test_gradients_are_those_of_separate_kernels(uses, has_norm) -> None:
    """Integers as filters and gradients: in float32 every order of a product's sum gives the same bits."""
    shape, groups = (4, 128, 6, 6), (2, 2)
    found = []
    for is_fused in (False, True):
        x, norm, other, other_norm, filters = inputs(shape, 32, torch.float16, has_norm)
        filters.data.copy_(filters.data.mul(16).round())
        dy = draw((4, 32, 6, 6), torch.float16, 5).detach().mul(16).round()
        second = draw(shape, torch.float16, 6).detach()
        if is_fused:
            y, shortcut, *_ = batch_norm_add_relu_conv1x1(
                ConvOutput(x), norm, ConvOutput(other), other_norm, filters, groups
            )
        elif other_norm is None:
            main, shortcut, _ = batch_norm_add_act(x, norm, other, groups, "relu")
            y = F.conv2d(main, filters)
        else:
            main, shortcut, *_ = batch_norm_add_norm_act(x, norm, other, other_norm, groups, "relu")
            y = F.conv2d(main, filters)
        outputs = {"both": [y, shortcut], "first": [y], "second": [shortcut]}[uses]
        torch.autograd.backward(outputs, {"both": [dy, second], "first": [dy], "second": [second]}[uses])
        assert (filters.grad is None) == (uses == "second")
        found.append([x.grad, other.grad, *(() if filters.grad is None else (filters.grad,))])
        sums = [norm.weight.grad, norm.bias.grad] if other_norm is None else [other_norm.weight.grad, norm.bias.grad]
        found[-1] += [value.half() for value in sums]
    for fused, separate in zip(found[1], found[0], strict=True):
        assert_near(fused, separate.double(), 1e-3)
    dz_separate, dz_fused = found[0][1], found[1][1]
    if not has_norm:
        assert torch.equal(dz_fused, dz_separate)


def test_only_the_gradients_that_are_needed_are_computed(monkeypatch) -> None:
    computed = []
    conv_gradients = ops.conv_gradients

    def noted(dy, y, filters, wanted):  # type: ignore[no-untyped-def]
        computed.append(wanted)
        return conv_gradients(dy, y, filters, wanted)

    monkeypatch.setattr(ops, "conv_gradients", noted)
    for is_frozen in (False, True):
        x, norm, other, _, filters = inputs((2, 64, 4, 4), 16, torch.float16, False)
        given = filters.detach() if is_frozen else filters
        y, shortcut, *_ = batch_norm_add_relu_conv1x1(ConvOutput(x), norm, ConvOutput(other), None, given, (2,))
        (y.sum() + shortcut.sum()).backward()
        assert (given.grad is None) == is_frozen and x.grad is not None and other.grad is not None
    assert computed == [(False, True), (False, False)]  # of input and weight


@pytest.mark.parametrize("is_one_kernel", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
def test_statistics_are_taken_and_given_where_they_are_known(has_norm, is_one_kernel, monkeypatch) -> None:
    """Sum and convolution by one kernel or by two: the sum, its mask and the gradients have the same bits."""
    groups, tile = (2, 1), SumForwardTile(64, 4, 2, 2)
    monkeypatch.setattr(ops, "FORWARD_CONFIGS", {(64, 16): tile} if is_one_kernel else {})
    x, norm, other, other_norm, filters = inputs((3, 64, 9, 8), 16, torch.float16, has_norm)
    y, shortcut, *known = batch_norm_add_relu_conv1x1(
        ConvOutput(x), norm, ConvOutput(other), other_norm, filters, groups
    )
    next_norm = parameters(16, 5)
    again, shortcut_again, *found, of_output = batch_norm_add_relu_conv1x1(
        ConvOutput(x, known[0]), norm, ConvOutput(other, known[1]), other_norm, filters, groups, next_norm
    )
    assert torch.equal(shortcut_again, shortcut) and torch.equal(found[0], known[0])
    assert found[1] is None if known[1] is None else torch.equal(found[1], known[1])
    assert_near(again, y.double(), TOLERANCE[torch.float16])
    assert_near(of_output, statistics(again, next_norm, channel_rows(again, groups)).double(), 1e-4)
    dy, second = torch.randn_like(y), torch.randn_like(shortcut)
    leaves = [t for t in (x, norm.weight, norm.bias, other, filters) if t.requires_grad]
    expected = torch.autograd.grad([y, shortcut], leaves, [dy, second])
    for ours, plain_gradient in zip(
        torch.autograd.grad([again, shortcut_again], leaves, [dy, second]), expected, strict=True
    ):
        assert torch.equal(ours, plain_gradient)


@pytest.mark.parametrize("uses", [(0,), (1,), (0, 1)])
def test_the_mask_of_one_kernel_passes_nan_and_what_is_positive(uses, monkeypatch) -> None:
    monkeypatch.setattr(ops, "FORWARD_CONFIGS", {(64, 16): SumForwardTile(64, 4, 2, 2)})
    x, norm, other, _, filters = inputs((2, 64, 9, 8), 16, torch.float16, False)
    with torch.no_grad():
        other[1, 3, 2, 2] = torch.nan
    outputs = batch_norm_add_relu_conv1x1(
        ConvOutput(x), norm, ConvOutput(other), None, filters, (2,), parameters(16, 5)
    )
    y, shortcut = outputs[:2]
    assert shortcut[1, 3, 2, 2].isnan() and y[1, :, 2, 2].isnan().all() and shortcut.isnan().sum() == 1
    gradients = [torch.zeros_like(y), torch.ones_like(shortcut)]
    torch.autograd.backward([outputs[i] for i in uses], [gradients[i] for i in uses])
    if uses == (0,):
        assert not other.grad.any()
    else:
        assert torch.equal(other.grad, (~(shortcut <= 0)).to(other.dtype))


def test_nan_reaches_the_gradients() -> None:
    x, norm, other, _, filters = inputs((2, 64, 4, 4), 16, torch.float16, False)
    y, *_ = batch_norm_add_relu_conv1x1(ConvOutput(x), norm, ConvOutput(other), None, filters, (2,))
    dy = torch.zeros_like(y)
    dy[1, 3, 2, 2] = torch.nan
    y.backward(dy)
    assert norm.bias.grad.isnan().any() and x.grad.isnan().any() and other.grad[1, :, 2, 2].isnan().any()
    assert not other.grad[0].isnan().any()


def test_other_convolutions_are_not_supported() -> None:
    x = draw((2, 256, 4, 4), torch.float16, 0)
    assert supports(x, torch.empty(64, 256, 1, 1)) and supports(x, torch.empty(256, 256, 1, 1))
    assert not supports(x.float(), torch.empty(64, 256, 1, 1))  # tensor cores do not multiply float32
    for shape in ((264, 256, 1, 1), (64, 256, 3, 3), (64, 128, 1, 1), (20, 256, 1, 1)):
        assert not supports(x, torch.empty(shape))
    assert not supports(draw((2, 1024, 2, 2), torch.float16, 0), torch.empty(512, 1024, 1, 1))
    assert not supports(draw((2, 64, 2, 2), torch.float16, 0), torch.empty(128, 64, 1, 1))
    assert not supports(draw((2, 48, 2, 2), torch.float16, 0), torch.empty(16, 48, 1, 1)), "its mask has other tiles"
