"""A convolution whose bias, sum and activation are one pass over its output equals plain operations."""

from __future__ import annotations

import pytest
import torch
from kernel_cases import TOLERANCE, assert_near, draw

from reconv.kernels.product import Shape, finished, plain, product


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("act", ["none", "relu", "relu6", "silu"])
@pytest.mark.parametrize("adds", [False, True])
def test_one_pass_over_the_output_equals_plain_operations(adds: bool, act, dtype: torch.dtype) -> None:
    shape = Shape((2, 2), (1, 1), (1, 1), 2, act)
    x, weight = draw((2, 8, 9, 9), dtype, 1).detach(), draw((24, 4, 3, 3), dtype, 2).detach()
    bias = draw((1, 24, 1, 1), dtype, 3).detach().flatten()
    other = draw((2, 24, 5, 5), dtype, 4).detach() if adds else None
    y = finished(x, weight, bias, other, shape)
    wide = None if other is None else other.double()
    expected = plain(x.double(), weight.double(), bias.double(), wide, shape)
    assert_near(y, expected, TOLERANCE[dtype])
    assert y.dtype == dtype and y.is_contiguous(memory_format=torch.channels_last)


def test_channels_that_kernels_do_not_take_are_computed_plainly() -> None:
    shape = Shape((1, 1), (0, 0), (1, 1), 1, "relu")
    x, weight, bias = torch.randn(2, 8, 4, 4), torch.randn(5, 8, 1, 1), torch.randn(5)
    other = torch.randn(2, 5, 4, 4)
    torch.testing.assert_close(finished(x, weight, bias, other, shape), plain(x, weight, bias, other, shape))


def test_on_the_cpu_the_plain_form_is_the_one() -> None:
    shape = Shape((1, 1), (0, 0), (1, 1), 1, "relu")
    x, weight, bias = torch.randn(2, 8, 4, 4), torch.randn(8, 8, 1, 1), torch.randn(8)
    assert torch.equal(product(x, weight, bias, None, shape), plain(x, weight, bias, None, shape))
