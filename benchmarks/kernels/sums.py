"""Residual sums whose output a 1x1 convolution reads, forward and backward, beside separate kernels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.kernels.harness import Row, Sizes, entry, image_bytes, random_norm, random_tensor, relative_error
from reconv.kernels.channels_last import ChannelRows, channel_rows
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.ops import batch_norm as norm
from reconv.kernels.ops import conv1x1_statistics as conv1x1
from reconv.kernels.ops import sum_conv1x1 as ops
from reconv.kernels.ops.batch_norm import NormInput, NormParams
from reconv.kernels.ops.sum_conv1x1 import SumConvTile, SumForwardTile

# Channels, outputs of the convolution, side, sum of two norms, number in ResNet-50, in ResNeXt-101 32x4d.
SHAPES = (
    (256, 64, 56, False, 1, 0), (256, 64, 56, True, 1, 0), (256, 128, 56, False, 1, 1), (256, 128, 56, True, 0, 1),
    (512, 128, 28, False, 2, 0), (512, 128, 28, True, 1, 0), (512, 256, 28, False, 1, 2), (512, 256, 28, True, 0, 1),
    (1024, 256, 14, False, 4, 0), (1024, 256, 14, True, 1, 0), (1024, 512, 14, False, 1, 21),
    (1024, 512, 14, True, 0, 1), (2048, 512, 7, False, 1, 0), (2048, 512, 7, True, 1, 0),
)  # fmt: skip
# By outputs and norms of the sum: rows, channels, warps, stages, programs per SM, register limit. Those left out spill.
TILES: dict[tuple[int, int], list[tuple[int, ...]]] = {
    (64, 1): [
        (64, 64, 4, 2, 4), (64, 64, 4, 3, 3), (64, 64, 4, 3, 4, 128), (128, 64, 4, 2, 2), (128, 64, 4, 2, 3, 168),
        (128, 64, 4, 3, 2), (128, 64, 8, 2, 2, 128), (64, 128, 8, 2, 2, 128), (64, 128, 8, 3, 2, 128),
        (64, 128, 4, 3, 2), (128, 128, 8, 2, 1), (64, 256, 8, 2, 1),
    ],
    (64, 2): [
        (64, 64, 4, 2, 3), (64, 64, 4, 3, 3), (64, 64, 4, 3, 4, 128), (128, 64, 4, 2, 2), (128, 64, 4, 3, 2),
        (64, 128, 8, 2, 2, 128), (128, 128, 8, 2, 1),
    ],
    (128, 1): [
        (64, 64, 4, 2, 4), (64, 64, 4, 3, 3, 128), (128, 64, 4, 2, 2), (128, 64, 8, 2, 2, 128), (64, 128, 4, 2, 2),
        (64, 128, 8, 2, 1), (64, 128, 8, 2, 2, 128), (64, 128, 8, 3, 1), (64, 128, 8, 3, 2, 128), (128, 128, 8, 2, 1),
        (64, 256, 8, 2, 1), (128, 128, 16, 2, 1, 128),
    ],
    (128, 2): [
        (64, 64, 4, 2, 3), (64, 64, 4, 3, 3), (128, 64, 4, 2, 2), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1),
        (64, 128, 8, 2, 2, 128), (128, 128, 8, 2, 1),
    ],
    (256, 1): [
        (64, 64, 4, 2, 2), (64, 64, 4, 1, 3), (128, 64, 8, 2, 1), (64, 128, 4, 2, 1), (64, 128, 8, 2, 1),
        (64, 128, 8, 3, 1), (64, 256, 8, 2, 1), (64, 128, 8, 1, 2, 128), (128, 64, 8, 1, 2, 128),
        (128, 128, 8, 1, 1), (128, 128, 16, 1, 1, 128), (64, 256, 16, 2, 1, 128),
    ],
    (256, 2): [
        (64, 64, 4, 2, 2), (64, 64, 4, 1, 2), (64, 128, 8, 2, 1), (64, 128, 8, 3, 1), (64, 128, 8, 1, 2, 128),
        (128, 128, 8, 1, 1),
    ],
    (512, 1): [(64, 64, 4, 1, 1), (64, 64, 8, 1, 1), (64, 64, 4, 2, 1), (64, 64, 8, 2, 1), (64, 128, 8, 1, 1)],
    (512, 2): [(64, 64, 8, 1, 1), (64, 64, 8, 2, 1), (64, 128, 8, 1, 1)],
}  # fmt: skip
FORWARD_TILES = (  # rows, warps, stages, programs per SM
    (64, 8, 2, 1), (64, 8, 3, 1), (64, 8, 1, 1), (64, 16, 2, 1), (64, 16, 3, 1), (64, 4, 2, 1), (64, 8, 1, 2),
)  # fmt: skip
WHOLE = ((256, 64, 56), (1024, 256, 14))
_NO_BIAS = ([1, 1], [0, 0], [1, 1], False, [0, 0], 1)  # of a 1x1 convolution's backward pass


@dataclass(frozen=True, slots=True)
class SumTensors:
    """The tensors of a sum and its convolution; `second` is the gradient of the sum's other use."""

    dy: Tensor
    filters: Tensor
    second: Tensor
    operand: NormInput
    other: NormInput | None
    bits: Tensor
    dz: Tensor
    y: Tensor
    of: NormParams  # the norm behind the convolution
    rows: ChannelRows
    groups: tuple[int, ...]

    def input_gradient(self) -> Tensor:
        """cuDNN's input gradient of the convolution."""
        gradients = torch.ops.aten.convolution_backward(
            self.dy, self.y, self.filters, None, *_NO_BIAS, [True, False, False]
        )
        dx: Tensor = gradients[0]
        return dx

    @property
    def num_sums(self) -> int:
        return 2 if self.other is None else 3

    def separate(self) -> Tensor:
        """Sums by separate kernels; writes dz."""
        operands = self.operand, self.other, self.bits, self.dz, self.rows
        return norm.gradient_sums(self.input_gradient(), self.second, *operands, "relu")[: self.num_sums]

    def ours(self, config: SumConvTile | None = None) -> Tensor:
        """Sums by the fused kernel; writes dz."""
        operands = self.operand, self.other, self.bits, self.dz, self.rows
        return ops.gradient_sums(self.dy, self.filters, self.second, *operands, config)[: self.num_sums]

    def error(self, config: SumConvTile | None) -> float:
        """The difference from separate kernels, up to rare roundings of the product."""
        expected, dz = self.separate().clone(), self.dz.clone()
        sums = self.ours(config)
        return max(relative_error(self.dz, dz), relative_error(sums, expected))

    def separate_forward(self) -> tuple[Tensor, ...]:
        """The sum, its convolution and the statistics by two kernels."""
        config = conv1x1.tile_config(self.rows.channels, len(self.filters))
        assert config is not None
        y = norm.write_output(self.operand, self.other or self.second, self.bits, self.rows, "relu")
        return y, *conv1x1.conv_output(y, self.filters, self.of, self.groups, config)

    def our_forward(self, tile: SumForwardTile) -> tuple[Tensor, ...]:
        """The same by one kernel."""
        y, _bits, *out = ops.sum_conv(self.operand, self.other or self.second, self.filters, self.of, self.rows, tile)
        return y, *out


def forward_error(used: SumForwardTile, tensors: SumTensors, tile: SumForwardTile | None) -> float:
    pairs = zip(tensors.our_forward(tile or used), tensors.separate_forward(), strict=True)
    return max(relative_error(actual, expected) for actual, expected in pairs)


def sum_tensors(channels: int, outputs: int, side: int, has_norm: bool, sizes: Sizes, device: str) -> SumTensors:
    x, second, added = (random_tensor(sizes.batch, channels, side, side, device=device) for _ in range(3))
    dy = random_tensor(sizes.batch, outputs, side, side, device=device)
    filters = random_tensor(outputs, channels, 1, 1, device=device)
    of, rows = random_norm(channels, device), channel_rows(x, sizes.norm_groups)
    operand = NormInput(x, norm.statistics(x, of, rows), of.weight.detach(), of.bias.detach())
    other = NormInput(added, norm.statistics(added, of, rows), *operand.tensors()[2:]) if has_norm else None
    bits = norm.empty_relu_mask(rows, x.device, "relu")
    y = norm.write_output(operand, added if other is None else other, bits, rows, "relu")
    behind = random_norm(outputs, device)
    return SumTensors(
        dy, filters, second, operand, other, bits, torch.empty_like(x), y, behind, rows, sizes.norm_groups
    )


def backward_rows(sizes: Sizes) -> Iterator[Row]:
    """cuDNN's input gradient with the gradient sums of the norm, and both in one kernel."""
    for channels, outputs, full_side, has_norm, *counts in SHAPES:
        side = sizes.side(full_side)
        is_used = outputs <= ops.MAX_OUTPUTS
        ways = {"separate": SumTensors.separate, "cuDNN's gradient": SumTensors.input_gradient}
        yield Row(
            name=f"{channels} to {outputs}, {full_side}, {1 + has_norm} norms{'' if is_used else ', not in use'}",
            draw=partial(sum_tensors, channels, outputs, side, has_norm, sizes),
            ways={**ways, "ours": SumTensors.ours},
            num_bytes=image_bytes(sizes.batch, channels, side) * (3 + has_norm + outputs / channels + 1 / 16),
            counts=dict(zip(("ResNet-50", "ResNeXt-101 32x4d"), counts, strict=True)) if is_used else {},
            configs=[ops.CONFIGS[outputs, 1 + has_norm], *(SumConvTile(*t) for t in TILES[outputs, 1 + has_norm])],
            ours=SumTensors.ours,
            error=SumTensors.error,
        )


def forward_rows(sizes: Sizes) -> Iterator[Row]:
    """The sum, its convolution and the statistics of the output, by two kernels and by one."""
    for channels, outputs in ops.FORWARD_CONFIGS:
        used, side = ops.FORWARD_CONFIGS[channels, outputs], sizes.side(56)
        for has_norm in (False, True):
            yield Row(
                name=f"{channels} to {outputs}, 56, {1 + has_norm} norms",
                draw=partial(sum_tensors, channels, outputs, side, has_norm, sizes),
                ways={
                    "separate": SumTensors.separate_forward,
                    "ours": partial(SumTensors.our_forward, tile=used),
                },
                num_bytes=image_bytes(sizes.batch, channels, side) * (3 + outputs / channels + 1 / 16),
                configs=[used, *(SumForwardTile(*values) for values in FORWARD_TILES)],
                ours=SumTensors.our_forward,
                error=partial(forward_error, used),
            )


def whole_rows(sizes: Sizes) -> Iterator[Row]:
    """Forward and backward pass of a sum and its convolution."""
    for channels, outputs, full_side in WHOLE:
        side = sizes.side(full_side)
        yield Row(
            name=f"{channels} to {outputs}, {full_side}: forward and backward",
            draw=partial(whole_calls, channels, outputs, side, sizes),
            ways={way: entry(way) for way in ("separate", "ours")},
            num_bytes=8 * image_bytes(sizes.batch, channels, side),
        )


def whole_calls(channels: int, outputs: int, side: int, sizes: Sizes, device: str) -> dict[str, Any]:
    x, other, second = (random_tensor(sizes.batch, channels, side, side, device=device) for _ in range(3))
    filters = random_tensor(outputs, channels, 1, 1, device=device)
    dy, of = random_tensor(sizes.batch, outputs, side, side, device=device), random_norm(channels, device)
    inputs = [tensor.requires_grad_() for tensor in (x, of.weight, of.bias, other, filters)]

    def ours() -> Any:
        operands = ConvOutput(x), of, ConvOutput(other), None, filters
        y, again, *_ = ops.batch_norm_add_relu_conv1x1(*operands, sizes.norm_groups)
        return torch.autograd.grad([y, again], inputs, [dy, second])

    def separate() -> Any:
        y, again, _ = norm.batch_norm_add_act(x, of, other, sizes.norm_groups, "relu")
        return torch.autograd.grad([F.conv2d(y, filters), again], inputs, [dy, second])

    return {"ours": ours, "separate": separate}
