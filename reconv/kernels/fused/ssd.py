"""The single-shot detector with fused extra maps, and with the two heads of a map as one convolution.

In training it returns `SSDFeatureMaps`, which the box-loss kernels read without rearranging.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.kernels import dispatch
from reconv.kernels.fused.blocks import FusedResNetBackbone
from reconv.kernels.fused.norm import norm_act
from reconv.kernels.fused.sums import DualUse, dual, single
from reconv.models.architecture import SSDOutput, flatten_predictions
from reconv.models.layers.conv import SameConv2d, same_padding
from reconv.models.ssd import SSD, Extra


class SSDFeatureMaps(NamedTuple):
    """A detector's output as its convolutions leave it: class logits, box deltas and zero padding along channels."""

    maps: tuple[Tensor, ...]  # [n, channels, height, width]
    biases: tuple[tuple[Tensor, Tensor], ...]  # of each map's logits and box deltas, still to be added
    per_cell: tuple[int, ...]  # default boxes of a cell of each map
    num_classes: int

    def output(self) -> SSDOutput:
        """Box deltas and logits by default box: map by map, in each the shape first, then the row, then the column."""
        box_deltas, logits = [], []
        for x, (class_bias, box_bias) in zip(self.maps, self.biases, strict=True):
            begin, end = len(class_bias), len(class_bias) + len(box_bias)
            logits.append(flatten_predictions(x[:, :begin] + class_bias.view(-1, 1, 1), self.num_classes))
            box_deltas.append(flatten_predictions(x[:, begin:end] + box_bias.view(-1, 1, 1), 4))
        return SSDOutput(torch.cat(box_deltas, dim=1), torch.cat(logits, dim=1))


class FusedExtra(Extra):
    """An extra map whose biases and ReLUs are one operation each; the first also writes uneven padding."""

    def forward(self, x: Tensor | DualUse) -> Any:
        conv1, conv2, norm1, norm2, act1, act2 = self
        assert isinstance(conv1, nn.Conv2d) and isinstance(conv2, nn.Conv2d)
        y = dual(x).shortcut
        padding = _padding(conv2, y)  # conv1 keeps the size
        if not self._supports(y, padding):
            y = norm_act(norm1, conv1(y), act1)
            return norm_act(norm2, conv2(y), act2)
        from reconv.kernels.ops.bias_relu import bias_relu, bias_relu_pad

        left, right, above, below = padding
        y = F.conv2d(y, conv1.weight)
        if (left, above) == (right, below):
            y, _ = bias_relu(y, conv1.get_parameter("bias"))
        else:  # cuDNN pads both ends of a side equally
            y, left, above = bias_relu_pad(y, conv1.get_parameter("bias"), padding), 0, 0
        y = F.conv2d(y, conv2.weight, stride=conv2.stride, padding=(above, left))
        return DualUse(*bias_relu(y, conv2.get_parameter("bias")))

    def _supports(self, x: Tensor, padding: tuple[int, int, int, int]) -> bool:
        """True if kernels support an extra map of x, without norms, and this padding of its first convolution."""
        conv1, conv2, norm1, norm2, *_ = self
        assert isinstance(conv1, nn.Conv2d) and isinstance(conv2, nn.Conv2d)
        if not (self.training and isinstance(norm1, nn.Identity) and isinstance(norm2, nn.Identity)):
            return False
        (height, width), (left, right, above, below) = x.shape[2:], padding
        num_values = len(x) * conv1.out_channels * (height + above + below) * (width + left + right)
        is_aligned = all(conv.out_channels % dispatch.CHANNEL_MULTIPLE == 0 for conv in (conv1, conv2))
        return dispatch.supports(x) and is_aligned and num_values <= dispatch.MAX_ELEMENTS


def _padding(conv: nn.Conv2d, x: Tensor) -> tuple[int, int, int, int]:
    """The zeros that a convolution of images of the size of x adds left, right, above and below."""
    assert not isinstance(conv.padding, str)
    vertical, horizontal = ((pad, pad) for pad in conv.padding)
    if isinstance(conv, SameConv2d):
        vertical, horizontal = (same_padding(side, conv.kernel_size[0], conv.stride[0]) for side in x.shape[2:])
    return *horizontal, *vertical


class FusedSSD(FusedResNetBackbone, SSD):
    """A detector that computes the two heads of each map as one convolution in training."""

    def heads(self, maps: tuple[Tensor | DualUse, ...]) -> Any:
        inputs = tuple(single(x) for x in maps)
        if not (self.training and all(dispatch.supports(x) for x in inputs)):
            return super().heads(inputs)
        pairs = list(zip(self.class_heads, self.box_heads, strict=True))
        outputs = tuple(_both_heads(*pair, x) for pair, x in zip(pairs, inputs, strict=True))
        biases = tuple((first.get_parameter("bias"), second.get_parameter("bias")) for first, second in pairs)
        return SSDFeatureMaps(outputs, biases, self.boxes_per_cell, self.num_classes)


def _both_heads(class_head: nn.Module, box_head: nn.Module, x: Tensor) -> Tensor:
    """Both heads of a map as one convolution without biases, with zeros up to channels that need no padded copy."""
    weights = [head.get_parameter("weight") for head in (class_head, box_head)]
    num_zeros = -sum(map(len, weights)) % dispatch.CHANNEL_MULTIPLE
    # In the convolution's dtype: torch.cat promotes to the widest of its inputs.
    zeros = _zero_filters((num_zeros, *weights[0].shape[1:]), dispatch.conv_output_dtype(x), x.device)
    return F.conv2d(x, torch.cat([*weights, zeros]), padding=1)


@cache
def _zero_filters(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Filters of zeros, channels_last; the same tensor in every step."""
    return torch.zeros(shape, dtype=dtype, device=device).contiguous(memory_format=torch.channels_last)
