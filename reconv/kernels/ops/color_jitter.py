"""Color jitter, flipping, scaling, shifting and casting of uint8 images, in two kernels.

The first sums each channel of each image, in integers, which are exact in any order; the second computes the rest pixel
by pixel. Each operation is rounded as in `data/transforms/color.py`, so the results have the bits of the tensor
operations on a CPU. On a GPU torch divides by 255 as a multiplication by 1 / 255, which differs in the last bit.
"""

from __future__ import annotations

import torch
from torch import Tensor

from reconv.kernels.jit.launch import launch
from reconv.kernels.ops import normalize_images

_CHANNELS = 3
_WHITE = 255
_MAX_PIXELS = (2**31 - 1) // _WHITE  # of an image: sums are 32-bit
_PIXELS, _SUMMED_PIXELS = 512, 2048  # of a program


def supports(images: Tensor, dtype: torch.dtype) -> bool:
    """True if the kernels support these images [n, channels, height, width]."""
    return (
        normalize_images.supports(images, dtype)
        and images.dtype == torch.uint8
        and images.shape[1] == _CHANNELS
        and images.shape[2] * images.shape[3] <= _MAX_PIXELS
    )


def jitter_and_normalize(
    images: Tensor, params: Tensor, flips: Tensor | None, factor: Tensor, shift: Tensor, dtype: torch.dtype
) -> Tensor:
    """Jittered images * factor + shift per channel, flipped where `flips` is true, channels_last.

    `params` [n, 4] float32 as in `device_color_params`: added brightness, factors of contrast and saturation, and hue
    shift, which is at most half of the color circle.
    """
    from reconv.kernels.triton import color_jitter as device

    samples, channels, height, width = images.shape
    num_pixels = height * width
    sums = torch.zeros(samples, channels, dtype=torch.int32, device=images.device)
    grid = (-(-num_pixels // _SUMMED_PIXELS), samples)
    dense = images if images.stride(2) == width * images.stride(3) else images.contiguous()
    stride_n, stride_c, _, stride_pixel = dense.stride()
    launch(device.channel_sums, grid, dense, sums, num_pixels, stride_n, stride_c, stride_pixel, PIXELS=_SUMMED_PIXELS)
    out = torch.empty(samples, height, width, channels, dtype=dtype, device=images.device)
    launch(
        device.jitter_and_normalize, (-(-num_pixels // _PIXELS), samples),
        images, sums, params.contiguous(), images if flips is None else flips, factor.view(-1), shift.view(-1), out,
        float(num_pixels * _WHITE), height, width, *images.stride(), FLIPS=flips is not None, PIXELS=_PIXELS,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
