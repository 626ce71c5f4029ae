"""The grouped convolution equals torch's, values and gradients."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import as_float64, assert_near, draw, pairwise
from torch import Tensor, nn

from reconv.kernels.fused.layers import FusedGroupedConv2d, fused_conv_class
from reconv.kernels.jit.launch import trace_launches
from reconv.kernels.ops import grouped_conv as ops
from reconv.kernels.ops.grouped_conv import GroupedConvTile, GroupedGradientTile, grouped_conv, supports

TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
# Channels per group and shape: programs with columns of several images, and some that are not full; a single line.
CASES = [(4, (3, 48, 5, 7)), (8, (2, 80, 3, 5)), (16, (3, 32, 4, 11)), (16, (1, 80, 1, 1)), (32, (2, 32, 5, 3))]
TILES = [
    (GroupedConvTile(16, 4, 1, 3), GroupedGradientTile(16, 4, 2, 1)),
    (GroupedConvTile(32, 2, 2, 2), GroupedGradientTile(32, 2, 1, 4)),
]


def fill_tables(monkeypatch: pytest.MonkeyPatch, conv: Any, gradient: Any) -> None:
    for table, value in (("FORWARD", conv), ("INPUT_GRADIENT", conv), ("WEIGHT_GRADIENT", gradient)):
        monkeypatch.setattr(ops, table, dict.fromkeys((4, 8, 16, 32), value))


def results(x: Tensor, weight: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output and gradients of leaves of their own."""
    leaves = x.detach().clone().requires_grad_(), weight.detach().clone().requires_grad_()
    y = grouped_conv(*leaves)
    return (y.detach(), *torch.autograd.grad(y, leaves, dy))


def tensors(size: int, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    return draw(shape, dtype, 0), draw((shape[1], size, 3, 3), dtype, 1), draw(shape, dtype, 2).detach()


@pytest.mark.parametrize("case, dtype, tiles", pairwise(CASES, list(TOLERANCE), TILES), ids=str)
def test_values_and_gradients_equal_torchs(case, dtype, tiles, monkeypatch) -> None:  # type: ignore[no-untyped-def]
    fill_tables(monkeypatch, *tiles)
    size, shape = case
    x, weight, dy = tensors(size, shape, dtype)
    exact = as_float64(x), as_float64(weight)
    expected = F.conv2d(*exact, padding=1, groups=shape[1] // size)
    gradients = torch.autograd.grad(expected, exact, dy.double())
    found = results(x, weight, dy)
    assert all(tensor.is_contiguous(memory_format=torch.channels_last) and tensor.dtype == dtype for tensor in found)
    for tensor, exactly in zip(found, (expected.detach(), *gradients), strict=True):
        assert_near(tensor, exactly, TOLERANCE[dtype])


@pytest.mark.parametrize("own", ["FORWARD", "INPUT_GRADIENT", "WEIGHT_GRADIENT"])
def test_each_pass_can_be_left_to_torch(own: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, dy = tensors(8, (2, 32, 5, 4), torch.float16)
    expected = results(x, weight, dy)
    kept = getattr(ops, own)
    fill_tables(monkeypatch, None, None)
    monkeypatch.setattr(ops, own, kept)
    for tensor, other in zip(results(x, weight, dy), expected, strict=True):
        assert_near(tensor, other.double(), TOLERANCE[torch.float16])


def test_weights_that_are_not_channels_last_are_supported() -> None:
    x, weight, dy = tensors(16, (2, 32, 4, 4), torch.float16)
    for tensor, other in zip(results(x, weight.contiguous(), dy), results(x, weight, dy), strict=True):
        assert torch.equal(tensor, other)


def test_the_weight_gradient_is_deterministic(monkeypatch: pytest.MonkeyPatch) -> None:
    """In several partial sums, which the interpreter computes one after the other: the GPU's test repeats it."""
    fill_tables(monkeypatch, GroupedConvTile(16, 4, 1, 1), GroupedGradientTile(16, 4, 1, 3))
    x, weight, dy = tensors(4, (5, 16, 3, 7), torch.float16)
    first, again = (results(x, weight, dy)[2] for _ in range(2))
    assert torch.equal(first, again)


@pytest.mark.parametrize("size", [4, 16])
def test_nan_reaches_its_neighbors_and_block_of_channels_alone(size: int) -> None:
    """Groups of less than 16 channels share a block with others; in the weight gradient they do not."""
    x, weight, dy = tensors(size, (2, 64, 5, 6), torch.float16)
    x.data[1, 33, 3, 4] = float("nan")
    y, _, dweight = results(x, weight, dy)
    block = max(size, 16)
    expected = torch.zeros_like(y, dtype=torch.bool)
    expected[1, 33 // block * block : 33 // block * block + block, 2:5, 3:6] = True
    assert torch.equal(y.isnan(), expected)
    reached = torch.zeros_like(dweight, dtype=torch.bool)
    reached[33 // size * size : 33 // size * size + size, 33 % size] = True
    assert torch.equal(dweight.isnan(), reached)


@contextmanager
def traced_sizes() -> Iterator[list[int]]:
    sizes: list[int] = []
    with trace_launches() as noted:
        yield sizes
    sizes += [dict(variant.constants)["SIZE"] for variant in noted if variant.kernel.__name__ == "conv"]


def test_large_batches_fit_into_a_launch_grid() -> None:
    """ResNeXt's first stage, of as many images as kernels count."""
    x = torch.empty(5349, 56, 56, 128, dtype=torch.bfloat16, device="meta").permute(0, 3, 1, 2).requires_grad_()
    weight = torch.empty(128, 4, 3, 3, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with traced_sizes() as sizes:
        y = grouped_conv(x, weight)
        torch.autograd.grad(y, (x, weight), torch.empty_like(y))
    assert sizes == [4]


def test_supported_convolutions() -> None:
    x, weight = torch.empty(2, 64, 5, 5, dtype=torch.float16), torch.empty(64, 4, 3, 3)
    assert supports(x, weight, torch.float16) and supports(x, weight, torch.bfloat16)
    assert not supports(x, weight, torch.float32)
    assert not supports(x, torch.empty(64, 4, 5, 5), torch.float16)
    assert not supports(x, torch.empty(64, 2, 3, 3), torch.float16)
    assert not supports(x[:, :8], torch.empty(8, 4, 3, 3), torch.float16), "half of a block"
    assert not supports(torch.empty(1, device="meta").expand(2**20, 64, 32, 1), weight, torch.float16)


def test_a_convolution_without_a_kernel_in_any_table_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    fill_tables(monkeypatch, None, None)
    assert not supports(torch.empty(2, 64, 5, 5), torch.empty(64, 4, 3, 3), torch.float16)


@pytest.mark.parametrize(
    "options",
    [
        {"stride": 2}, {"bias": True}, {"dilation": 2, "padding": 2}, {"padding": 0}, {"groups": 1}, {"groups": 32},
        {"out_channels": 128}, {"kernel_size": 5, "padding": 2}, {"kernel_size": (3, 1), "padding": (1, 0)},
    ],
    ids=str,
)  # fmt: skip
def test_other_convolutions_are_not_swapped(options: dict[str, Any]) -> None:
    plain: dict[str, Any] = {
        "in_channels": 64, "out_channels": 64, "kernel_size": 3, "padding": 1, "groups": 16, "bias": False,
    }  # fmt: skip
    assert fused_conv_class(nn.Conv2d(**plain)) is FusedGroupedConv2d
    assert fused_conv_class(nn.Conv2d(**plain | options)) is not FusedGroupedConv2d


def test_the_module_falls_back_where_kernels_do_not_support_the_input() -> None:
    conv = FusedGroupedConv2d(32, 32, 3, padding=1, groups=8, bias=False)
    for x in (torch.randn(2, 32, 5, 5), torch.randn(2, 32, 5, 5).contiguous(memory_format=torch.channels_last)):
        assert torch.equal(conv(x), F.conv2d(x, conv.weight, padding=1, groups=8))
    with torch.autocast("cpu", torch.float16):
        y = conv(x)
        assert y.dtype == torch.float16 and y.grad_fn.name().startswith("_GroupedConv")
        assert "Convolution" in conv.eval()(x).grad_fn.name()
    assert_near(y, F.conv2d(x.double(), conv.weight.double(), padding=1, groups=8), TOLERANCE[torch.float16])


def test_a_second_derivative_is_an_error() -> None:
    x, weight, dy = tensors(16, (1, 16, 3, 3), torch.float16)
    (dx,) = torch.autograd.grad(grouped_conv(x, weight), x, dy.requires_grad_(), create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()
