"""The stem's convolution over blocks of pixels equals the plain one, and prepared images those of tensor operations."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from reconv.kernels.stem import accepts, prepare_images, stem_images, stem_weight


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("shape", [(2, 3, 16, 12), (3, 1, 10, 14), (1, 4, 8, 8)])
def test_the_convolution_over_blocks_equals_the_plain_one(shape, layout) -> None:
    images = torch.randn(*shape).contiguous(memory_format=layout)
    plain = torch.randn(8, shape[1], 7, 7, dtype=torch.float64, requires_grad=True)
    weight = plain.detach().clone().requires_grad_()
    assert accepts(images, weight)
    y64 = F.conv2d(images.double(), plain, stride=2, padding=3)
    y = F.conv2d(stem_images(images, torch.float32).double(), stem_weight(weight))
    torch.testing.assert_close(y, y64, rtol=1e-12, atol=1e-12)
    dy = torch.randn_like(y64)
    y.backward(dy)
    y64.backward(dy)
    torch.testing.assert_close(weight.grad, plain.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shape, kernel", [((2, 3, 15, 12), 7), ((2, 5, 16, 16), 7), ((2, 3, 16, 16), 3)])
def test_other_convolutions_keep_their_form(shape, kernel) -> None:
    assert not accepts(torch.randn(*shape), torch.randn(8, shape[1], kernel, kernel))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("has_flips", [False, True])
def test_images_prepared_in_one_pass_equal_those_of_tensor_operations(has_flips, layout) -> None:
    images = torch.randint(0, 256, (3, 3, 9, 7), dtype=torch.uint8).contiguous(memory_format=layout)
    flips = torch.tensor([True, False, True])
    factor, shift = torch.rand(1, 3, 1, 1) / 50, torch.randn(1, 3, 1, 1)
    out = prepare_images(images, flips if has_flips else None, factor, shift, torch.float32)
    expected = torch.where(flips.view(-1, 1, 1, 1), images.flip(-1), images) if has_flips else images
    assert out.is_contiguous(memory_format=torch.channels_last)
    torch.testing.assert_close(out, expected.float() * factor + shift, rtol=1e-6, atol=1e-6)
