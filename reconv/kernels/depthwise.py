"""Depthwise convolution of channels_last images, with the gradients of images and weight.

Owns the autograd function and the shapes of tiles. Refuses to know modules. Limits: `fused.available` of the images,
one filter per channel, an odd square kernel, padded by half of it, no dilation, no bias. Invariant: the gradient of
the weight is added in an order that depends on shapes and the device alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from reconv.kernels import depthwise_triton as device
from reconv.kernels.rows import num_sms

KERNELS = (3, 5, 7)
STRIDES = (1, 2)
_BLOCKS = (64, 32, 16, 8)
_TILE_PIXELS = 64
_WIDEST_TILE = 16
_PROGRAMS_PER_SM = 8  # that add the weight's gradient


def depthwise(x: Tensor, weight: Tensor, stride: int) -> Tensor:
    """Each channel of x convolved with its own filter of weight [channels, 1, k, k], padded by k // 2."""
    output: Tensor = _Depthwise.apply(x, weight, stride)  # type: ignore[no-untyped-call]
    return output


@dataclass(frozen=True, slots=True)
class _Shape:
    """A convolution in numbers."""

    images: int
    channels: int
    height: int
    width: int
    kernel: int
    stride: int

    @property
    def out_height(self) -> int:
        return (self.height - 1) // self.stride + 1

    @property
    def out_width(self) -> int:
        return (self.width - 1) // self.stride + 1

    @property
    def block(self) -> int:
        """Channels of a program: as many as leave the fewest idle."""
        return min(_BLOCKS, key=lambda block: (-self.channels % block, -block))

    @property
    def num_blocks(self) -> int:
        return -(-self.channels // self.block)

    def counts(self) -> tuple[int, int, int, int, int]:
        """Channels in eights, so that the compiler sees them aligned, and sides."""
        return self.channels // 8, self.height, self.width, self.out_height, self.out_width


class _Depthwise(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, stride: int) -> Tensor:
        shape = _Shape(x.shape[0], x.shape[1], x.shape[2], x.shape[3], weight.shape[2], stride)
        y = x.new_empty((shape.images, shape.channels, shape.out_height, shape.out_width)).contiguous(
            memory_format=torch.channels_last
        )
        grid, tiles = _tiles(shape, shape.out_height, shape.out_width)
        device.convolve[grid](x, weight.contiguous(), y, *shape.counts(), **tiles)
        ctx.save_for_backward(x, weight)
        ctx.shape = shape
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        shape = ctx.shape
        dy = dy.contiguous(memory_format=torch.channels_last)
        dx = dweight = None
        if ctx.needs_input_grad[0]:
            dx = torch.empty_like(x)
            grid, tiles = _tiles(shape, shape.height, shape.width)
            device.spread[grid](dy, weight.contiguous(), dx, *shape.counts(), **tiles)
        if ctx.needs_input_grad[1]:
            dweight = _weight_gradient(dy, x, shape).to(weight.dtype).view(weight.shape)
        return dx, dweight, None


def _tiles(shape: _Shape, height: int, width: int) -> tuple[tuple[int, int, int], dict[str, int]]:
    """The programs that cover images of these sides, and what they must know."""
    wide = min(_WIDEST_TILE, 1 << (width - 1).bit_length())
    tall = _TILE_PIXELS // wide
    across, down = -(-width // wide), -(-height // tall)
    tiles = {"tiles_across": across, "KERNEL": shape.kernel, "STRIDE": shape.stride, "TALL": tall, "WIDE": wide}
    return (shape.num_blocks, across * down, shape.images), {**tiles, "BLOCK": shape.block}


def _weight_gradient(dy: Tensor, x: Tensor, shape: _Shape) -> Tensor:
    """[channels, taps] in float32."""
    kernel, wide = shape.kernel, 16 if shape.out_width > 8 else 8
    num_lines, num_pieces = shape.images * shape.out_height, -(-shape.out_width // wide)
    programs = shape.num_blocks * kernel
    splits = max(1, min(num_lines * num_pieces, _PROGRAMS_PER_SM * num_sms(x.device) // programs))
    partial = torch.empty((splits, kernel * kernel, shape.channels), dtype=torch.float32, device=x.device)
    device.weigh[(programs, splits)](
        dy, x, partial, *shape.counts(), num_lines, num_pieces,
        KERNEL=kernel, COLUMNS=1 << (kernel - 1).bit_length(), STRIDE=shape.stride, WIDE=wide, BLOCK=shape.block,
    )  # fmt: skip
    return partial.sum(0).t().contiguous()
