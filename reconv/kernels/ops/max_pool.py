"""Max-pooling of channels_last images, in training and inference.

Supports images of `dispatch.supports` and square windows of at most 15 pixels, padded by at most half of it or as SAME,
without dilation. Ties and NaN are resolved as in torch: the first of equal values, and NaN above all.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.jit.launch import MAX_GRID_YZ, launch
from reconv.kernels.triton import max_pool as device
from reconv.kernels.window import PoolWindow

_BLOCKS = (64, 32)
_TILE_PIXELS = 32
_WIDEST_TILE = 16
_STRIP_COLUMNS = 16
_STRIP_LINES = 16  # at most
_WARP_VALUES = 32 * 8  # 8 channels per thread


def max_pool(x: Tensor, window: PoolWindow) -> Tensor:
    """The max-pool of x."""
    output: Tensor = _MaxPool.apply(x, window)  # type: ignore[no-untyped-call]
    return output


def max_pool_and_input(x: Tensor, window: PoolWindow) -> tuple[Tensor, Tensor]:
    """The max-pool of x, and x for one more use, whose gradient the pool's backward kernel adds to its own."""
    output: tuple[Tensor, Tensor] = _MaxPoolAndInput.apply(x, window)  # type: ignore[no-untyped-call]
    return output


def supports(x: Tensor, window: PoolWindow) -> bool:
    """True if the numbers of images and tiles fit into a launch grid."""
    images, channels, height, width = x.shape
    sides = ((height, width), (window.out_side(height), window.out_side(width)))
    grids = [divide(images, channels, *lengths)[0] for lengths in sides for divide in (_tiles, _strips)]
    return max(size for grid in grids for size in grid[1:]) <= MAX_GRID_YZ


def max_pool_inference(x: Tensor, window: PoolWindow) -> Tensor:
    """The max-pool of x without a gradient."""
    return _forward(x, window, None)


def _forward(x: Tensor, window: PoolWindow, place: Tensor | None) -> Tensor:
    """The pooled values; `place` receives the index of each within its window."""
    images, channels, height, width = x.shape
    sides = (window.out_side(height), window.out_side(width))
    y = torch.empty((images, channels, *sides), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    written = y, y if place is None else place
    counts, constants = (channels // 8, height, width, *sides), {"PLACES": int(place is not None)}
    constants |= {"STRIDE": window.stride, **_padding_before(x, window)}
    if window.side == 3 and window.stride <= 2:
        grid, division, tile = _strips(images, channels, *sides)
        launch(device.pool_lines, grid, x, *written, *counts, *division, **constants, **tile)
    else:
        grid, division, tile = _tiles(images, channels, *sides)
        launch(device.pool, grid, x, *written, *counts, *division, KERNEL=window.side, **constants, **tile)
    return y


def _padding_before(x: Tensor, window: PoolWindow) -> dict[str, int]:
    return {"ABOVE": window.before(x.shape[2]), "LEFT": window.before(x.shape[3])}


class _MaxPool(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: PoolWindow) -> Tensor:
        return _forward_for_backward(ctx, x, window)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return _backward(ctx, dy, None), None


class _MaxPoolAndInput(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, window: PoolWindow) -> tuple[Tensor, Tensor]:
        ctx.set_materialize_grads(False)
        return _forward_for_backward(ctx, x, window), x.detach()

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None, dx: Tensor | None) -> tuple[Tensor | None, None]:
        return dx if dy is None else _backward(ctx, dy, dx), None


def _forward_for_backward(ctx: Any, x: Tensor, window: PoolWindow) -> Tensor:
    """The pooled values; what backward needs is saved."""
    images, channels, height, width = x.shape
    out = (images, channels, window.out_side(height), window.out_side(width))
    place = torch.empty(out, dtype=torch.uint8, device=x.device, memory_format=torch.channels_last)
    ctx.sides = (height, width, out[2], out[3])
    ctx.window, ctx.shape, ctx.before = window, x.shape, _padding_before(x, window)
    ctx.save_for_backward(place)
    return _forward(x, window, place)


def _backward(ctx: Any, dy: Tensor, other: Tensor | None) -> Tensor:
    """The gradient of the input, plus the other gradient if there is one."""
    (place,) = ctx.saved_tensors
    images, channels, height, width = ctx.shape
    dy = dy.contiguous(memory_format=torch.channels_last)
    dx = torch.empty(ctx.shape, dtype=dy.dtype, device=dy.device, memory_format=torch.channels_last)
    added = dx if other is None else other.contiguous(memory_format=torch.channels_last)
    tensors, counts = (dy, place, added, dx), (channels // 8, *ctx.sides)
    constants = {"TWO_GRADS": int(other is not None), **ctx.before}
    side, stride = ctx.window.side, ctx.window.stride
    if (side, stride) == (3, 1):
        grid, division, tile = _strips(images, channels, height, width)
        launch(device.gradient_lines, grid, *tensors, *counts, *division, **constants, **tile)
    else:
        grid, division, tile = _tiles(images, channels, height, width)
        constants |= {"KERNEL": side, "STRIDE": stride, "WINDOWS": -(-side // stride)}
        launch(device.gradient, grid, *tensors, *counts, *division, **constants, **tile)
    return dx


Division = tuple[tuple[int, int, int], tuple[int, ...], dict[str, int]]  # launch grid, counts and constants


def _tiles(images: int, channels: int, height: int, width: int) -> Division:
    """Tiles of a few lines and columns."""
    wide = min(_WIDEST_TILE, 1 << (width - 1).bit_length())
    tall = _TILE_PIXELS // wide
    across, down = -(-width // wide), -(-height // tall)
    block = _block(channels)
    return (-(-channels // block), across * down, images), (across,), {"TALL": tall, "WIDE": wide, "BLOCK": block}


def _strips(images: int, channels: int, height: int, width: int) -> Division:
    """Strips of a few columns, from top to bottom of smaller images, in equal parts of larger ones."""
    wide = min(_STRIP_COLUMNS, 1 << (width - 1).bit_length())
    across, down = -(-width // wide), -(-height // _STRIP_LINES)
    block = _block(channels)
    tile = {"WIDE": wide, "BLOCK": block, "num_warps": max(1, wide * block // _WARP_VALUES)}
    return (-(-channels // block), across * down, images), (across, -(-height // down)), tile


def _block(channels: int) -> int:
    """Channels of a program: the most that leave few of them unused."""
    return min(_BLOCKS, key=lambda block: (-channels % block, -block))
