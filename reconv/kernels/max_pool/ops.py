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
from reconv.kernels.max_pool import triton as device
from reconv.kernels.window import PoolWindow

_BLOCKS = (64, 32)
_TILE_PIXELS = 32
_WIDEST_TILE = 16


def max_pool(x: Tensor, window: PoolWindow) -> Tensor:
    """The max-pool of x."""
    output: Tensor = _MaxPool.apply(x, window)  # type: ignore[no-untyped-call]
    return output


def max_pool_and_input(x: Tensor, window: PoolWindow) -> tuple[Tensor, Tensor]:
    """The max-pool of x, and x for one more use, whose gradient the pool's backward kernel adds to its own."""
    output: tuple[Tensor, Tensor] = _MaxPoolAndInput.apply(x, window)  # type: ignore[no-untyped-call]
    return output


def supports(x: Tensor, window: PoolWindow) -> bool:
    """Whether the numbers of images and tiles fit into a launch grid."""
    images, channels, height, width = x.shape
    inputs, _, _ = _tiles(images, channels, height, width, window)
    outputs, _, _ = _tiles(images, channels, window.out_side(height), window.out_side(width), window)
    return max(*inputs[1:], *outputs[1:]) <= MAX_GRID_YZ


def max_pool_inference(x: Tensor, window: PoolWindow) -> Tensor:
    """The max-pool of x without a gradient."""
    return _forward(x, window, None)


def _forward(x: Tensor, window: PoolWindow, place: Tensor | None) -> Tensor:
    """The pooled values; `place` receives the index of each within its window."""
    images, channels, height, width = x.shape
    sides = (window.out_side(height), window.out_side(width))
    y = torch.empty((images, channels, *sides), dtype=x.dtype, device=x.device, memory_format=torch.channels_last)
    grid, across, known = _tiles(images, channels, *sides, window)
    known |= _padding_before(x, window) | {"PLACES": int(place is not None)}
    launch(
        device.pool, grid, x, y, y if place is None else place, channels // 8, height, width, *sides, across, **known
    )
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
    grid, across, known = _tiles(images, channels, height, width, ctx.window)
    known |= ctx.before | {"TWO_GRADS": int(other is not None)}
    added = dx if other is None else other.contiguous(memory_format=torch.channels_last)
    launch(device.gradient, grid, dy, place, added, dx, channels // 8, *ctx.sides, across, **known)
    return dx


def _tiles(
    images: int, channels: int, height: int, width: int, window: PoolWindow
) -> tuple[tuple[int, int, int], int, dict[str, int]]:
    """The launch grid for images of these sizes, the tiles along a row, and the constants."""
    block = min(_BLOCKS, key=lambda block: (-channels % block, -block))
    wide = min(_WIDEST_TILE, 1 << (width - 1).bit_length())
    tall = _TILE_PIXELS // wide
    across, down = -(-width // wide), -(-height // tall)
    known = {"TALL": tall, "WIDE": wide, "BLOCK": block}
    known |= {"KERNEL": window.side, "STRIDE": window.stride}
    return (-(-channels // block), across * down, images), across, known
