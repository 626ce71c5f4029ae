"""A 1x1 convolution of a norm's activation that is never written equals the plain one, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import TOLERANCE, assert_near, draw, parameters, plain, wide, wide_norm
from torch import nn

from reconv.kernels import reference
from reconv.kernels.fused_modules.fused_norm import FusedBatchNorm2d, norm_act_conv1x1
from reconv.kernels.norm_conv1x1.ops import batch_norm_act_conv1x1, supports


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("act", ["none", "relu", "relu6", "silu"])
@pytest.mark.parametrize(
    "shape, outputs, groups",
    [((3, 24, 5, 7), 16, (3,)), ((5, 72, 6, 6), 24, (2, 3)), ((2, 136, 9, 8), 72, (2,)), ((2, 8, 3, 3), 8, (1, 1))],
    ids=str,
)
def test_values_and_gradients_equal_the_plain_ones(shape, outputs, groups, act, dtype) -> None:
    x, filters = draw(shape, dtype, 0), draw((outputs, shape[1], 1, 1), dtype, 1)
    norm = parameters(shape[1], 2)
    y, statistics = batch_norm_act_conv1x1(x, norm, filters, groups, act)
    exact, exact_norm, exact_filters = wide(x), wide_norm(norm), wide(filters)
    z, records = plain(exact, exact_norm, groups)
    expected = F.conv2d(reference.ACTIVATION_FUNCTIONS[act](z), exact_filters)
    assert y.is_contiguous(memory_format=torch.channels_last)
    tolerance = TOLERANCE[dtype]
    assert_near(y, expected, tolerance)
    assert_near(statistics[:, :2], records, tolerance)
    dy = draw(y.shape, dtype, 3)
    y.backward(dy)
    expected.backward(dy.double())
    assert_near(x.grad, exact.grad, tolerance)
    assert_near(filters.grad, exact_filters.grad, tolerance)
    assert_near(norm.weight.grad, exact_norm.weight.grad, tolerance)
    assert_near(norm.bias.grad, exact_norm.bias.grad, tolerance)


def test_other_convolutions_are_not_taken() -> None:
    x = draw((2, 64, 4, 4), torch.float16, 0)
    assert supports(x, torch.empty(32, 64, 1, 1))
    assert not supports(x.float(), torch.empty(32, 64, 1, 1))  # products of float32 are not for tensor cores
    for shape in ((96, 64, 1, 1), (32, 64, 3, 3), (32, 32, 1, 1), (20, 64, 1, 1)):
        assert not supports(x, torch.empty(shape))
    assert not supports(draw((2, 512, 4, 4), torch.float16, 0), torch.empty(160, 512, 1, 1))


def test_a_norm_takes_in_no_convolution_of_a_stride_or_with_biases() -> None:
    x, norm = draw((2, 64, 4, 4), torch.float16, 0), FusedBatchNorm2d(64)
    norm.groups = (2,)
    calls = []
    for conv in (nn.Conv2d(64, 32, 1, bias=False), nn.Conv2d(64, 32, 1), nn.Conv2d(64, 32, 1, stride=2, bias=False)):
        conv.half().register_forward_hook(lambda conv, *_: calls.append(conv))
        norm_act_conv1x1(norm, x, nn.ReLU(), conv)
    assert [(conv.bias is None, conv.stride[0]) for conv in calls] == [(False, 1), (True, 2)]
