"""A 7x7 or 3x3 convolution of stride 2 over few channels as a 4x4 or 2x2 convolution over 2x2 blocks of pixels.

Images are rearranged by one kernel, padding included; weights by tensor operations, so that gradients flow back to the
plain weights. Outputs equal those of the plain convolution up to the order of sums. In half precision a kernel computes
the convolution and the batch norm statistics of its output. All of it can be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from reconv.kernels.channels_last import counters, split_tiles
from reconv.kernels.dispatch import CHANNEL_MULTIPLE, DTYPES, MAX_ELEMENTS
from reconv.kernels.jit.launch import launch
from reconv.kernels.ops.batch_norm import NormParams
from reconv.kernels.triton import stem as device
from reconv.kernels.window import MAX_STEM_CHANNELS, STEM_KERNELS

_DEPTH = 4 * MAX_STEM_CHANNELS  # 2x2 pixels of 3 channels, zero-padded to 16 channels for tensor cores
_PIXELS = 256


@dataclass(frozen=True, slots=True)
class StemConvTile:
    """Columns and outputs of a tile, rows of taps per load, warps, pipeline stages, programs per SM, and a limit of
    registers per thread.

    As for 1x1 convolutions, a tile has 16 outputs or more for each warp.
    """

    columns: int
    outputs: int
    lines: int
    warps: int
    stages: int
    programs_per_sm: int
    registers: int | None = None


# By kernel; measured on an H200 (benchmarks/LOG.md).
CONV_CONFIGS = {7: StemConvTile(32, 64, 1, 4, 3, 2), 3: StemConvTile(128, 32, 2, 2, 3, 4)}


def supports(images: Tensor, weight: Tensor) -> bool:
    """True if images and weight [out, channels, k, k] can be rearranged: few channels, even sides."""
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


def supports_statistics(images: Tensor, weight: Tensor, dtype: torch.dtype) -> bool:
    """True if a kernel computes the convolution of supported images in this dtype with its statistics."""
    pixels = len(images) * (images.shape[2] // 2) * (images.shape[3] // 2)
    return (
        dtype in (torch.bfloat16, torch.float16)
        and len(weight) % CHANNEL_MULTIPLE == 0
        and pixels * len(weight) <= MAX_ELEMENTS
    )


def stem_conv_statistics(
    blocks: Tensor, filters: Tensor, norm: NormParams, groups: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """The convolution over blocks, and mean, unbiased variance and 1 / std [groups, 3, outputs] of its output.

    Filters are those of `space_to_depth_weight` in any dtype; blocks have no gradient. The statistics have no gradient
    of their own: the norm's backward pass includes it.
    """
    output: tuple[Tensor, Tensor] = _StemConvStatistics.apply(  # type: ignore[no-untyped-call]
        filters, blocks, norm, tuple(groups)
    )
    return output


class _StemConvStatistics(Function):
    @staticmethod
    def forward(
        ctx: Any, filters: Tensor, blocks: Tensor, norm: NormParams, groups: Sequence[int]
    ) -> tuple[Tensor, Tensor]:
        y, stats = conv_output(blocks, filters, norm, groups)
        ctx.save_for_backward(filters, blocks)
        ctx.mark_non_differentiable(stats)
        ctx.set_materialize_grads(False)
        return y, stats

    @staticmethod
    def backward(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor | None, ...]:
        filters, blocks = ctx.saved_tensors
        dy = dy.contiguous(memory_format=torch.channels_last)
        _dx, dfilters, _bias = torch.ops.aten.convolution_backward(
            *(dy, blocks, filters.to(blocks.dtype), None, [1, 1], [0, 0], [1, 1], False, [0, 0], 1),
            [False, True, False],
        )
        return dfilters.to(filters.dtype), None, None, None


def conv_output(
    blocks: Tensor, filters: Tensor, norm: NormParams, groups: Sequence[int], config: StemConvTile | None = None
) -> tuple[Tensor, Tensor]:
    """The convolution's output and its statistics, with the configuration in use or another one."""
    samples, outputs, taps = len(blocks), len(filters), filters.shape[-1]
    height, width = (side - taps + 1 for side in blocks.shape[2:])
    config = CONV_CONFIGS[2 * taps - 1] if config is None else config
    num_blocks, num_tiles = -(-outputs // config.outputs), -(-max(groups) * width // config.columns) * height
    splits, tiles = split_tiles(blocks, groups, num_tiles, config.programs_per_sm, num_blocks)
    grid = (num_blocks, splits, len(groups))
    y = torch.empty(samples, height, width, outputs, dtype=blocks.dtype, device=blocks.device)
    stats = torch.empty(len(groups), 3, outputs, dtype=torch.float32, device=blocks.device)
    partials = torch.empty(len(groups) * splits * 2 * outputs, dtype=torch.float32, device=blocks.device)
    tile = {"TAPS": taps, "LINES": config.lines, "COLUMNS": config.columns, "BLOCK": config.outputs}
    tile |= {"STAGES": config.stages, "num_warps": config.warps}
    launch(
        device.conv, grid,
        blocks, filters.to(blocks.dtype).contiguous(memory_format=torch.channels_last), y, norm.running_var, stats,
        partials, counters(grid[0] * grid[2], blocks.device), samples, groups[0], height, width, tiles, outputs // 8,
        norm.eps, **(tile if config.registers is None else tile | {"maxnreg": config.registers}),
    )  # fmt: skip
    return y.permute(0, 3, 1, 2), stats
