"""Fused bias and ReLU equal plain operations, with the gradients of both uses."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, as_float64, assert_near, draw

from reconv.kernels.bias_relu.ops import bias_relu


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
