"""Fused bias and ReLU equal plain operations, with the gradients of both uses, and padded."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, as_float64, assert_near, draw

from reconv.kernels.ops.bias_relu import bias_relu, bias_relu_pad


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape, uses", [((3, 24, 5, 4), 2), ((2, 72, 1, 1), 1)])
def test_bias_and_relu_equal_the_plain_ones(shape, uses, dtype) -> None:
    x, bias = draw(shape, dtype, 1), torch.randn(shape[1], generator=torch.Generator().manual_seed(2)).requires_grad_()
    x64, bias64 = as_float64(x), as_float64(bias)
    both = bias_relu(x, bias)
    expected = F.relu(x64 + bias64.view(1, -1, 1, 1))
    assert both[0].data_ptr() == both[1].data_ptr() and both[0].is_contiguous(memory_format=torch.channels_last)
    assert_near(both[0], expected, TOLERANCE[dtype])
    gradients = [torch.randn_like(both[0]) for _ in range(uses)]
    torch.autograd.backward(both[:uses], gradients)
    expected.backward(torch.stack([g.double() for g in gradients]).sum(0))
    assert_near(x.grad, x64.grad, TOLERANCE[dtype])
    assert_near(bias.grad, bias64.grad, TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("shape, padding", [((3, 72, 6, 4), (0, 1, 0, 1)), ((9, 16, 13, 9), (2, 0, 1, 3))])
def test_padded_bias_and_relu_have_the_bits_of_separate_operations(shape, padding, dtype) -> None:
    bias = torch.randn(shape[1], generator=torch.Generator().manual_seed(2))
    found = []
    for is_fused in (False, True):
        leaves = [draw(shape, dtype, 1), bias.clone().requires_grad_()]
        y = bias_relu_pad(*leaves, padding) if is_fused else F.pad(bias_relu(*leaves)[0], padding)
        assert y.is_contiguous(memory_format=torch.channels_last)
        y.backward(draw(y.shape, dtype, 3).detach())
        found.append([y.detach(), *(leaf.grad for leaf in leaves)])
    assert found[0][0].any() and len(found[0]) == 3
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)
