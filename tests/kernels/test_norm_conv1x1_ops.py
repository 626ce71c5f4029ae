"""Fused norm, activation and 1x1 convolution equal plain operations, forward and backward."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import DTYPES, TOLERANCE, as_float64, assert_near, draw, norm_as_float64, pairwise, parameters, plain
from torch import nn

from reconv.kernels import reference
from reconv.kernels.fused.conv1x1 import norm_act_conv1x1
from reconv.kernels.fused.norm import FusedBatchNorm2d
from reconv.kernels.ops.norm_conv1x1 import batch_norm_act_conv1x1, supports

SHAPES = [((3, 24, 5, 7), 16, (3,)), ((5, 72, 6, 6), 24, (2, 3)), ((2, 136, 9, 8), 72, (2,)), ((2, 8, 3, 3), 8, (1, 1))]


@pytest.mark.parametrize("case, act, dtype", pairwise(SHAPES, ["none", "relu", "relu6", "silu"], DTYPES), ids=str)
def test_norm_act_conv1x1_equals_plain_operations(case, act, dtype) -> None:
    shape, outputs, groups = case
    x, filters = draw(shape, dtype, 0), draw((outputs, shape[1], 1, 1), dtype, 1)
    norm = parameters(shape[1], 2)
    y, statistics = batch_norm_act_conv1x1(x, norm, filters, groups, act)
    exact, exact_norm, exact_filters = as_float64(x), norm_as_float64(norm), as_float64(filters)
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


def test_other_convolutions_are_not_supported() -> None:
    x = draw((2, 64, 4, 4), torch.float16, 0)
    assert supports(x, torch.empty(32, 64, 1, 1))
    assert not supports(x.float(), torch.empty(32, 64, 1, 1))  # tensor cores do not multiply float32
    for shape in ((96, 64, 1, 1), (32, 64, 3, 3), (32, 32, 1, 1), (20, 64, 1, 1)):
        assert not supports(x, torch.empty(shape))
    assert not supports(draw((2, 512, 4, 4), torch.float16, 0), torch.empty(160, 512, 1, 1))


def test_convolutions_with_stride_or_bias_are_not_fused() -> None:
    x, norm = draw((2, 64, 4, 4), torch.float16, 0), FusedBatchNorm2d(64)
    norm.groups = (2,)
    calls = []
    for conv in (nn.Conv2d(64, 32, 1, bias=False), nn.Conv2d(64, 32, 1), nn.Conv2d(64, 32, 1, stride=2, bias=False)):
        conv.half().register_forward_hook(lambda conv, *_: calls.append(conv))
        norm_act_conv1x1(norm, x, nn.ReLU(), conv)
    assert [(conv.bias is None, conv.stride[0]) for conv in calls] == [(False, 1), (True, 2)]
