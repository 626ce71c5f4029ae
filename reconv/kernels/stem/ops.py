"""A 7x7 or 3x3 convolution of stride 2 over few channels as a 4x4 or 2x2 convolution over 2x2 blocks of pixels.

Images are rearranged by one kernel, padding included; weights by tensor operations, so that gradients flow back to the
plain weights. Outputs equal those of the plain convolution up to the order of sums.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels.dispatch import DTYPES, MAX_ELEMENTS
from reconv.kernels.jit.launch import launch
from reconv.kernels.stem import triton as device
from reconv.kernels.window import MAX_STEM_CHANNELS, STEM_KERNELS

_DEPTH = 4 * MAX_STEM_CHANNELS  # 2x2 pixels of 3 channels, zero-padded to 16 channels for tensor cores
_PIXELS = 256


def supports(images: Tensor, weight: Tensor) -> bool:
    """Whether images and weight [out, channels, k, k] can be rearranged: few channels, even sides."""
    channels, height, width = images.shape[1:]
    kernel = weight.shape[-1]
    return (
        images.dtype in DTYPES
        and not images.requires_grad
        and kernel in STEM_KERNELS
        and tuple(weight.shape[1:]) == (channels, kernel, kernel)
        and channels <= MAX_STEM_CHANNELS
        and height % 2 == width % 2 == 0
        and images.shape[0] * (height // 2 + kernel // 2) * (width // 2 + kernel // 2) * _DEPTH <= MAX_ELEMENTS
    )


def space_to_depth(images: Tensor, kernel: int, dtype: torch.dtype) -> Tensor:
    """Blocks [n, 16, height / 2 + k // 2, width / 2 + k // 2] of images [n, channels, height, width], padded."""
    samples, channels, height, width = images.shape
    before = (kernel + 1) // 4
    after = kernel // 2 - before
    sides = (height // 2 + kernel // 2, width // 2 + kernel // 2)
    out = torch.empty(samples, *sides, _DEPTH, dtype=dtype, device=images.device)
    num_pixels = samples * sides[0] * sides[1]
    launch(
        device.space_to_depth, (-(-num_pixels // _PIXELS),),
        images, out, num_pixels, height, width, *images.stride(), CHANNELS=channels, BEFORE=before, AFTER=after,
        DEPTH=_DEPTH, PIXELS=_PIXELS,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def space_to_depth_weight(weight: Tensor) -> Tensor:
    """The weight [out, 16, h, h] over blocks, h = (k + 1) / 2, from [out, channels, k, k]."""
    out_channels, channels, kernel, _ = weight.shape
    half = (kernel + 1) // 2
    taps = F.pad(weight, (1, 0, 1, 0)).view(out_channels, channels, half, 2, half, 2)
    blocks = taps.permute(0, 3, 5, 1, 2, 4).reshape(out_channels, 4 * channels, half, half)
    return F.pad(blocks, (0, 0, 0, 0, 0, _DEPTH - 4 * channels)).contiguous(memory_format=torch.channels_last)
