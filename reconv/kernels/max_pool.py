"""Max-pool of channels_last images.

Owns the autograd function and the shapes of tiles. Refuses to know modules. Limits: `fused.available` of the images, a
square window of at most 15 places a side, padded by less than half of it, no dilation. Invariant: the value, and the
gradient's way, of torch's own pool: the first of equal values, and a NaN above all.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels import max_pool_triton as device
from reconv.kernels.launch import launch

_BLOCKS = (64, 32)
_TILE_PIXELS = 32
_WIDEST_TILE = 16


@dataclass(frozen=True, slots=True)
class Window:
    """A pool's window."""

    side: int
    stride: int
    pad: int
    ceil: bool  # whether a window may begin inside and end outside

    def out_side(self, side: int) -> int:
        """Windows along a side of so many pixels."""
        room = side + 2 * self.pad - self.side
        number = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        begins_outside = self.ceil and (number - 1) * self.stride >= side + self.pad
        return number - 1 if begins_outside else number


def max_pool(x: Tensor, window: Window) -> Tensor:
    """The largest value of each window."""
    output: Tensor = _MaxPool.apply(x, window)  # type: ignore[no-untyped-call]
    return output


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: Window) -> Tensor:
        images, channels, height, width = x.shape
        out = (images, channels, window.out_side(height), window.out_side(width))
        y = torch.empty(out, dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
        place = torch.empty(out, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
        ctx.sides = (height, width, out[2], out[3])
        ctx.window, ctx.shape = window, x.shape
        grid, across, known = _tiles(images, channels, out[2], out[3], window)
        launch(device.pool, grid, x, y, place, channels // 8, *ctx.sides, across, **known)
        ctx.save_for_backward(place)
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (place,) = ctx.saved_tensors
        images, channels, height, width = ctx.shape
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
        grid, across, known = _tiles(images, channels, height, width, ctx.window)
        launch(device.gradient, grid, dy, place, dx, channels // 8, *ctx.sides, across, **known)
        return dx, None


def _tiles(
    images: int, channels: int, height: int, width: int, window: Window
) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """The programs that cover images of these sides, tiles beside each other, and the constants."""
    block = min(_BLOCKS, key=lambda block: (-channels % block, -block))
    wide = min(_WIDEST_TILE, 1 << (width - 1).bit_length())
    tall = _TILE_PIXELS // wide
    across, down = -(-width // wide), -(-height // tall)
    known = {"TALL": tall, "WIDE": wide, "BLOCK": block}
    known |= {"KERNEL": window.side, "STRIDE": window.stride, "PAD": window.pad}
    return (-(-channels // block), across * down, images), across, known
