"""Fused squeeze-and-excitation equals plain operations, values and gradients."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, as_float64, assert_near, draw

from reconv.kernels.ops.squeeze_excite import squeeze_excite


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape", [(2, 24, 9, 9), (3, 8, 1, 1), (1, 72, 5, 13)], ids=str)
def test_gated_images_and_all_gradients_equal_plain_operations(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    x, weight = draw(shape, dtype, seed=1), draw((shape[1], shape[1], 1, 1), dtype, seed=2)
    exact_x, exact_weight = as_float64(x), as_float64(weight)
    y = squeeze_excite(x, lambda means: torch.sigmoid(torch.einsum("oixy,nixy->noxy", weight, means)))
    gate = torch.sigmoid(torch.einsum("oixy,nixy->noxy", exact_weight, exact_x.mean((2, 3), keepdim=True)))
    expected = exact_x * gate
    assert_near(y, expected, TOLERANCE[dtype])
    dy = draw(shape, dtype, seed=3).detach()
    y.backward(dy)
    expected.backward(dy.double())
    assert_near(x.grad, exact_x.grad, TOLERANCE[dtype])
    assert_near(weight.grad, exact_weight.grad, 2 * TOLERANCE[dtype])
