"""Squeeze and excitation over channels_last images: their means, and their product with a gate.

Owns the autograd functions. Refuses to know the small network between the two. Limits: `fused.available` of the
images. Invariant: each pass reads and writes each image once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels import excite_triton as device
from reconv.kernels.launch import launch

_LANES = 64
_BLOCKS = (64, 32, 16)


def squeeze(x: Tensor) -> tuple[Tensor, Tensor]:
    """The images for their other use, and their means over pixels [n, channels, 1, 1].

    The other use has a gradient of its own, to which the backward pass adds that of the means while it reads it.
    """
    output: tuple[Tensor, Tensor] = _Squeeze.apply(x)  # type: ignore[no-untyped-call]
    return output


def excite(x: Tensor, gate: Tensor) -> Tensor:
    """The images times a gate [n, channels, 1, 1]."""
    output: Tensor = _Excite.apply(x, gate)  # type: ignore[no-untyped-call]
    return output


class _Squeeze(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        means = torch.empty((*x.shape[:2], 1, 1), dtype=x.dtype, device=x.device)
        grid, counts, known = _programs(x)
        launch(device.means, grid, x, means, *counts, **known)
        return x.detach(), means

    @staticmethod
    def backward(ctx: Any, dy: Tensor, dmeans: Tensor) -> Tensor:
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty_like(dy)
        grid, counts, known = _programs(dy)
        launch(device.means_gradient, grid, dy, dmeans.contiguous(), dx, *counts, **known)
        return dx


class _Excite(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        y, gate = torch.empty_like(x), gate.contiguous()
        grid, counts, known = _programs(x)
        launch(device.scale, grid, x, gate, y, *counts, **known)
        ctx.save_for_backward(x, gate)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        x, gate = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx, dgate = torch.empty_like(x), torch.empty_like(gate)
        grid, counts, known = _programs(x)
        launch(device.scale_gradient, grid, dy, x, gate, dx, dgate, *counts, **known)
        return dx, dgate


def _programs(x: Tensor) -> tuple[tuple[int, int], tuple[int, int], dict[str, int]]:
    """The programs that cover the images, eighths of channels and pixels, and the constants."""
    images, channels, height, width = x.shape
    block = min(_BLOCKS, key=lambda block: (-channels % block, -block))
    known = {"LANES": _LANES, "BLOCK": block}
    return (-(-channels // block), images), (channels // 8, height * width), known
