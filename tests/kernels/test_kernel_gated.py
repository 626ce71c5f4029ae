"""Squeeze and excitation of a norm's activation through kernels equals plain operations, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, assert_near, draw, parameters, plain, wide, wide_norm
from torch import Tensor

from reconv.kernels import reference
from reconv.kernels.gated import excite, excite_join
from reconv.kernels.norm import Norm
from reconv.kernels.reference import Activation

SHAPES = [((5, 24, 9, 9), (2, 3)), ((3, 8, 1, 1), (3,)), ((2, 72, 5, 13), (1, 1)), ((3, 16, 36, 36), (2, 1))]


def gate_by(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda means: torch.sigmoid(torch.einsum("oixy,nixy->noxy", weight, means))


def drawn(shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Norm, Tensor]:
    return (
        draw(shape, dtype, seed=1, offset=0.3),
        parameters(shape[1], seed=2),
        draw((shape[1], shape[1], 1, 1), dtype, seed=3),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ["none", "relu", "relu6", "silu"])
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_gated_activations_of_a_norm_and_all_gradients_equal_plain_operations(
    shape: tuple[int, ...], groups: tuple[int, ...], act: Activation, dtype: torch.dtype
) -> None:
    x, norm, weight = drawn(shape, dtype)
    exact_x, exact_norm, exact_weight = wide(x), wide_norm(norm), wide(weight)
    y, stats = excite(x, norm, groups, act, gate_by(weight))
    z, records = plain(exact_x, exact_norm, groups)
    activation = reference.FUNCTIONS[act](z)
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


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("num_uses", [1, 2])
@pytest.mark.parametrize("shape, groups", SHAPES, ids=str)
def test_a_gated_residual_sum_and_all_gradients_equal_plain_operations(
    shape: tuple[int, ...], groups: tuple[int, ...], num_uses: int, dtype: torch.dtype
) -> None:
    x, norm, weight = drawn(shape, dtype)
    other = draw(shape, dtype, seed=5)
    exact_x, exact_norm, exact_weight, exact_other = wide(x), wide_norm(norm), wide(weight), wide(other)
    first, second, _ = excite_join(x, norm, other, groups, gate_by(weight))
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
