"""Global average pooling whose backward pass writes the gradient of channels_last images once.

The forward pass is torch's. Torch's own backward pass writes a contiguous gradient, which the layer before the pool has
to copy to channels_last.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.triton.global_avg_pool import broadcast_to_pixels

_PIXELS = 16  # of a tile
_BLOCKS = (256, 128, 64, 32)  # channels of a tile


def supports(x: Tensor) -> bool:
    """True if the kernel supports images that `dispatch.supports`."""
    return len(x) <= MAX_GRID_YZ


def global_avg_pool(x: Tensor) -> Tensor:
    """The mean of each channel [n, channels, 1, 1] of channels_last images [n, channels, height, width]."""
    means: Tensor = _GlobalAvgPool.apply(x)  # type: ignore[no-untyped-call]
    return means


class _GlobalAvgPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.shape, ctx.dtype = x.shape, x.dtype
        return F.adaptive_avg_pool2d(x, 1)

    @staticmethod
    def backward(ctx: Any, dmeans: Tensor) -> Tensor:
        samples, channels, height, width = ctx.shape
        # Divided and rounded as torch does, so that the gradient has the same bits.
        pixel_grad = (dmeans / (height * width)).to(ctx.dtype).contiguous()
        dx = torch.empty(ctx.shape, dtype=ctx.dtype, device=dmeans.device, memory_format=torch.channels_last)
        block = min(_BLOCKS, key=lambda block: (-channels % block, -block))
        launch(
            broadcast_to_pixels, (-(-channels // block), samples),
            pixel_grad, dx, channels // 8, height * width, PIXELS=_PIXELS, BLOCK=block,
        )  # fmt: skip
        return dx
