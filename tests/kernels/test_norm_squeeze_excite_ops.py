"""Fused norm, activation and squeeze-and-excitation equal plain operations, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, TOLERANCE, as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain
from torch import Tensor, nn

from reconv.kernels import reference
from reconv.kernels.fuse import fuse
from reconv.kernels.fused.sums import DualUse, norm_squeeze_excite_add_relu, single
from reconv.kernels.ops.batch_norm import NormParams, batch_norm_add_act
from reconv.kernels.ops.norm_squeeze_excite import (
    batch_norm_act_squeeze_excite,
    batch_norm_squeeze_excite_add_relu,
    supports,
)
from reconv.kernels.reference import Activation
from reconv.models.layers.batch_norm import BatchNorm2d
from reconv.models.layers.conv import SqueezeExcitation

SHAPES = [((5, 24, 9, 9), (2, 3)), ((3, 8, 1, 1), (3,)), ((2, 72, 5, 13), (1, 1)), ((3, 16, 36, 36), (2, 1))]


def gate_by(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda means: torch.sigmoid(torch.einsum("oixy,nixy->noxy", weight, means))


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, NormParams, Tensor]:
    return (
        draw(shape, dtype, seed=1, offset=0.3),
        parameters(shape[1], seed=2),
        draw((shape[1], shape[1], 1, 1), dtype, seed=3),
    )


@pytest.mark.parametrize("case, act, dtype", pairwise(SHAPES, ["none", "relu", "relu6", "silu"], DTYPES), ids=str)
def test_norm_act_squeeze_excite_equals_plain_operations(
    case: tuple[tuple[int, ...], tuple[int, ...]], act: Activation, dtype: torch.dtype
) -> None:
    shape, groups = case
    x, norm, weight = drawn(shape, dtype)
    exact_x, exact_norm, exact_weight = as_float64(x), norm_as_float64(norm), as_float64(weight)
    y, stats = batch_norm_act_squeeze_excite(x, norm, groups, act, gate_by(weight))
    z, records = plain(exact_x, exact_norm, groups)
    activation = reference.ACTIVATION_FUNCTIONS[act](z)
    expected = activation * gate_by(exact_weight)(activation.mean((2, 3), keepdim=True))
    assert_near(y, expected, TOLERANCE[dtype])
    assert_near(stats[:, :2], records, TOLERANCE[dtype])
    dy = draw(shape, dtype, seed=4).detach()
    y.backward(dy)
    expected.backward(dy.double())
    assert_near(x.grad, exact_x.grad, 2 * TOLERANCE[dtype])
    assert_near(norm.weight.grad, exact_norm.weight.grad, 2 * TOLERANCE[dtype])
    assert_near(norm.bias.grad, exact_norm.bias.grad, 2 * TOLERANCE[dtype])
    assert_near(weight.grad, exact_weight.grad, 2 * TOLERANCE[dtype])


@pytest.mark.parametrize("case, num_uses, dtype", pairwise(SHAPES, [1, 2], DTYPES), ids=str)
def test_norm_squeeze_excite_add_relu_equals_plain_operations(
    case: tuple[tuple[int, ...], tuple[int, ...]], num_uses: int, dtype: torch.dtype
) -> None:
    shape, groups = case
    x, norm, weight = drawn(shape, dtype)
    other = draw(shape, dtype, seed=5)
    exact_x, exact_norm, exact_weight, exact_other = (
        as_float64(x),
        norm_as_float64(norm),
        as_float64(weight),
        as_float64(other),
    )
    first, second, _ = batch_norm_squeeze_excite_add_relu(x, norm, other, groups, gate_by(weight))
    z = plain(exact_x, exact_norm, groups)[0]
    total = z * gate_by(exact_weight)(z.mean((2, 3), keepdim=True)) + exact_other
    expected = F.relu(total)
    assert_near(first, expected, TOLERANCE[dtype])
    assert torch.equal(first, second)
    keep = (total.abs() > 1e-2).to(dtype)  # at a kink a last bit decides
    gradients = [draw(shape, dtype, seed=6 + use).detach() * keep for use in range(num_uses)]
    torch.autograd.backward((first, second)[:num_uses], gradients)
    expected.backward(sum(gradient.double() for gradient in gradients))
    assert_near(x.grad, exact_x.grad, 2 * TOLERANCE[dtype])
    assert_near(other.grad, exact_other.grad, TOLERANCE[dtype])
    assert_near(weight.grad, exact_weight.grad, 3 * TOLERANCE[dtype])  # a sum of the gate's rounded gradients
    assert_near(norm.weight.grad, exact_norm.weight.grad, 2 * TOLERANCE[dtype])
    assert_near(norm.bias.grad, exact_norm.bias.grad, 2 * TOLERANCE[dtype])


def test_gradient_of_a_residual_sum_passes_where_it_is_positive_or_nan() -> None:
    shape = (2, 8, 3, 3)
    x, norm, weight = drawn(shape, torch.float32)
    for sum_of in (
        lambda other: batch_norm_squeeze_excite_add_relu(x, norm, other, (2,), gate_by(weight))[0],
        lambda other: batch_norm_add_act(x, norm, other, (2,), "relu")[0],
    ):
        other = draw(shape, torch.float32, seed=5)
        with torch.no_grad():
            other[1, 2, 0, 0] = torch.nan
        y = sum_of(other)
        assert int(y.isnan().sum()) == 1
        y.backward(torch.ones_like(y))
        assert other.grad is not None
        assert torch.equal(other.grad, (~(y <= 0)).float())


def test_more_images_than_a_launch_grid_holds_are_not_supported() -> None:
    assert supports(torch.empty(65535, 8, 1, 1)) and not supports(torch.empty(65536, 8, 1, 1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_a_shortcut_of_another_dtype_falls_back_to_torch(dtype: torch.dtype) -> None:
    norm, se, act = BatchNorm2d(8), SqueezeExcitation(8, 2, nn.ReLU()), nn.ReLU()
    norm.groups = (3,)
    x, shortcut = draw((3, 8, 2, 2), torch.float32, seed=1), draw((3, 8, 2, 2), dtype, seed=2)
    expected = act(se(norm(x)) + shortcut)
    assert fuse(nn.ModuleList([norm, se])) == 2
    y = norm_squeeze_excite_add_relu(norm, x, se, shortcut, act)
    assert isinstance(y, DualUse) == (dtype == torch.float32)
    torch.testing.assert_close(single(y), expected, rtol=1e-4, atol=1e-5)
