"""The stem's convolution over 2x2 blocks of pixels equals the plain one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import pairwise

from reconv.kernels.stem.ops import space_to_depth, space_to_depth_weight, supports
from reconv.kernels.window import STEM_KERNELS


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
