"""The 7x7 convolution of stride 2 over few channels as a 4x4 one of stride 1 over blocks of 2x2 pixels.

Owns the two rearrangements: of the images (one pass, padding included) and of the weights (tensor operations, so that
their gradient finds its way back). Refuses to know modules and who convolves. Invariant: the same products are added,
so outputs and weight gradients are those of the plain convolution up to the order of sums, and what is saved are the
plain weights. Limits: `accepts`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from reconv.kernels import stem_triton as device
from reconv.kernels.fused import DTYPES
from reconv.kernels.launch import launch

KERNEL = 7
_BEFORE, _AFTER = 2, 1  # rows of blocks above and below: a window starts 3 pixels above, at the 4th of an 8-tap form
_DEPTH = 16  # 2 x 2 x 3 channels and zeros: what tensor cores read at once
_PIXELS = 256
_VALUES = 1024
_MOST_VALUES = 2**31 - 1


def accepts(images: Tensor, weight: Tensor) -> bool:
    """Whether images and weights [out, channels, 7, 7] have the space-to-depth form: few channels, even sides."""
    channels, height, width = images.shape[1:]
    return (
        images.dtype in DTYPES
        and not images.requires_grad
        and tuple(weight.shape[1:]) == (channels, KERNEL, KERNEL)
        and channels * 4 <= _DEPTH
        and height % 2 == width % 2 == 0
        and images.shape[0] * (height // 2 + 3) * (width // 2 + 3) * _DEPTH <= _MOST_VALUES
    )


def stem_images(images: Tensor, dtype: torch.dtype) -> Tensor:
    """Blocks [n, 16, height / 2 + 3, width / 2 + 3] of images [n, channels, height, width], padding included."""
    samples, channels, height, width = images.shape
    sides = (height // 2 + _BEFORE + _AFTER, width // 2 + _BEFORE + _AFTER)
    out = torch.empty(samples, *sides, _DEPTH, dtype=dtype, device=images.device)
    num_pixels = samples * sides[0] * sides[1]
    launch(
        device.space_to_depth, (-(-num_pixels // _PIXELS),),
        images, out, num_pixels, height, width, *images.stride(), CHANNELS=channels, BEFORE=_BEFORE, AFTER=_AFTER,
        DEPTH=_DEPTH, PIXELS=_PIXELS,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)


def stem_weight(weight: Tensor) -> Tensor:
    """Weights [out, 16, 4, 4] of the form over blocks, from [out, channels, 7, 7]."""
    out_channels, channels = weight.shape[:2]
    taps = F.pad(weight, (1, 0, 1, 0)).view(out_channels, channels, 4, 2, 4, 2)
    blocks = taps.permute(0, 3, 5, 1, 2, 4).reshape(out_channels, 4 * channels, 4, 4)
    return F.pad(blocks, (0, 0, 0, 0, 0, _DEPTH - 4 * channels)).contiguous(memory_format=torch.channels_last)


def prepare_images(images: Tensor, flips: Tensor | None, factor: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Images times factor plus shift, of each channel, those with a flip mirrored, channels_last, in one pass."""
    samples, channels, height, width = images.shape
    out = torch.empty(samples, height, width, channels, dtype=dtype, device=images.device)
    num_pixels = samples * height * width
    launch(
        device.prepare, (-(-num_pixels * channels // _VALUES),),
        images, images if flips is None else flips, factor.view(-1), shift.view(-1), out, num_pixels, height, width,
        *images.stride(), CHANNELS=channels, FLIPS=flips is not None, VALUES=_VALUES,
    )  # fmt: skip
    return out.permute(0, 3, 1, 2)
