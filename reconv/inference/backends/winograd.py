"""Winograd convolutions for the layers and batches where they are faster than oneDNN's direct ones.

Which convolutions are Winograd's depends on the shape of a batch alone, never on the number of threads or on timing,
so that ranks give the bits of one process (tests/inference/test_winograd.py).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from reconv.inference.backends.winograd_library import (
    PLAIN,
    TILE,
    can_use_threads,
    fastest_instructions,
    problem,
    transform_weights,
    winograd_conv,
)
from reconv.kernels.ops.conv_candidates import ConvConfig

# Measured against oneDNN 3.12 on one core with AVX-512 and AVX2; see benchmarks/LOG.md.
# Not by the number of threads: ranks with fewer of them give the bits of one process.
_MIN_CHANNELS = 16
_MIN_TILES = 12  # transformed weights are four times as large: fewer tiles wait for memory
_MIN_FILLED_FRACTION = 0.5  # of the pixels of the tiles

_ACTIVATIONS = ("none", "relu")
_MAX_DIFFERENCE = 1e-4  # from the direct convolution, relative to the largest output


def with_winograd(direct: nn.Module, weight: Tensor, bias: Tensor, config: ConvConfig) -> nn.Module:
    """`direct`, or a module that equals it and is faster for some batches; both take (x, other, gate)."""
    if not is_supported(weight, config):
        return direct
    convolution = WinogradConvolution(direct, weight, bias, config)
    return convolution if _equals_direct(convolution, weight) else direct


def is_supported(weight: Tensor, config: ConvConfig) -> bool:
    """True if the library has such a convolution, for instructions that were measured, on the threads of torch."""
    is_plain = config.stride == config.padding == config.dilation == (1, 1) and config.groups == 1
    is_float = weight.dtype == torch.float32 and tuple(weight.shape[2:]) == (3, 3)
    has_channels = min(weight.shape[:2]) >= _MIN_CHANNELS
    if not (is_plain and is_float and has_channels and config.act in _ACTIVATIONS):
        return False
    return not problem() and fastest_instructions() != PLAIN and (torch.get_num_threads() == 1 or can_use_threads())


def is_faster(batch: int, height: int, width: int) -> bool:
    """True if a supported convolution of so many images is faster than a direct one."""
    num_tiles = batch * -(-height // TILE) * -(-width // TILE)
    min_pixels = _MIN_FILLED_FRACTION * num_tiles * TILE * TILE
    return num_tiles >= _MIN_TILES and batch * height * width >= min_pixels


class WinogradConvolution(nn.Module):
    """act(conv(x) + bias + other): by Winograd's algorithm where that is faster, else by `direct`."""

    def __init__(self, direct: nn.Module, weight: Tensor, bias: Tensor, config: ConvConfig) -> None:
        super().__init__()
        self.direct = direct
        self._weights = transform_weights(weight, bias)
        self._has_relu = config.act == "relu"

    def forward(self, x: Tensor, other: Tensor | None, gate: Tensor | None) -> Tensor:
        if gate is None and is_faster(len(x), x.shape[2], x.shape[3]):
            return self.winograd(x, other)
        y: Tensor = self.direct(x, other, gate)
        return y

    def winograd(self, x: Tensor, other: Tensor | None) -> Tensor:
        """The output by Winograd's algorithm, for any batch."""
        return winograd_conv(x, self._weights, other, self._has_relu)


def _equals_direct(convolution: WinogradConvolution, weight: Tensor) -> bool:
    """True if both ways give the same on one small image."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1, weight.shape[1], TILE + 2, TILE + 1, generator=generator)
    x = x.contiguous(memory_format=torch.channels_last)
    expected = convolution.direct(x, None, None).double()
    difference = (convolution.winograd(x, None).double() - expected).abs().max()
    return bool(difference <= _MAX_DIFFERENCE * expected.abs().max().clamp(min=1e-30))
