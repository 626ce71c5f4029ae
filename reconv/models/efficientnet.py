"""EfficientNet (Tan and Le, 2019), sizes B0 to B7, with options of later variants.

The options: grouped instead of depthwise convolutions (Masters et al., 2021), another expansion ratio, squeeze and
excitation sized by the expanded width or left out, ReLU. Parameter names are torchvision's, and so is the epsilon of
each size (B0 to B4 1e-5, B5 to B7 1e-3; the paper's program has 1e-3 in all).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.models.architecture import (
    InitScheme,
    LinearInit,
    ReconvModel,
    Spec,
    Stage,
    Stem,
    ZeroGamma,
    zero_gamma_norms,
)
from reconv.models.layers.conv import Activation, ConvNormAct, SqueezeExcitation, make_activation
from reconv.models.layers.dropout import DropConnect, Dropout
from reconv.models.mobilenet import round_channels

# Table 1 of the paper: whether the block expands, kernel, first stride, channels, repeats.
_ROWS = (
    (False, 3, 1, 16, 1),
    (True, 3, 2, 24, 2),
    (True, 5, 2, 40, 2),
    (True, 3, 2, 80, 3),
    (True, 5, 1, 112, 3),
    (True, 5, 2, 192, 4),
    (True, 3, 1, 320, 1),
)
_STEM_CHANNELS = 32
_SE_RATIO = 4


@dataclass(frozen=True, kw_only=True)
class EfficientNetSpec(Spec):
    """The options of an EfficientNet."""

    width_coefficient: float = 1.0
    """Factor of the channels of every layer."""
    depth_coefficient: float = 1.0
    """Factor of the number of blocks."""
    depth_divisor: int = 8
    """Numbers of channels are multiples of it."""
    top_width: int = 1280
    """Channels of the top convolution, before the width coefficient; 0 is no top convolution."""
    dropout: float = 0.2
    """Dropout rate before the classifier."""
    drop_connect: float = 0.2
    """Drop-connect rate of the last block, linear from 0 at the first; 1 minus the survival probability."""
    drop_connect_per: Literal["sample", "batch"] = "sample"
    """Drop blocks for single samples or for a whole group of the batch."""
    expand_ratio: int = 6
    """Factor of the channels inside a block."""
    group_dim: int = 1
    """Channels per group of a block's middle convolution; 1 is depthwise."""
    se: bool = True
    """Use squeeze and excitation."""
    se_base: Literal["input", "expanded"] = "input"
    """Channels whose quarter is the hidden units of squeeze and excitation; expanded is wide SE."""
    activation: Activation = "silu"
    """Activation function."""
    stem: Stem = "imagenet"
    """First strides: 2 (imagenet), or 1 for the first two (cifar)."""
    zero_gamma: ZeroGamma = "never"
    """Blocks that initialize the weight of their last norm to zero; no-projection is those with a shortcut."""
    linear_init: LinearInit = "uniform_out"
    """Initialization of linear layers."""

    def build(self) -> EfficientNet:
        """The model, with torch's default initialization."""
        return EfficientNet(self)

    def scaled_width(self, channels: int) -> int:
        """Channels times the width coefficient, rounded."""
        return round_channels(channels * self.width_coefficient, self.depth_divisor)

    def scaled_depth(self, repeats: int) -> int:
        """Repeats times the depth coefficient, rounded up."""
        return math.ceil(repeats * self.depth_coefficient)

    def conv_norm_act(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> ConvNormAct:
        """A convolution, its norm and the activation."""
        conv = self.make_conv(in_channels, out_channels, kernel, stride, groups)
        return ConvNormAct(conv, *self.make_norm_act(out_channels, make_activation(self.activation)))

    def num_groups(self, channels: int) -> int:
        """Groups of the middle convolution, each with at least `group_dim` channels."""
        groups = max(channels // self.group_dim, 1)
        if channels % groups:
            raise UsageError(
                f"group_dim: {self.group_dim} makes {groups} groups, which do not divide {channels} channels"
            )
        return groups


class MBConv(nn.Module):
    """1x1 up, depthwise or grouped convolution, squeeze and excitation, 1x1 down; a shortcut where shapes agree."""

    def __init__(
        self, spec: EfficientNetSpec, in_channels: int, out_channels: int, *, expansion: int, kernel: int, stride: int
    ) -> None:
        super().__init__()
        inner = in_channels * expansion
        layers: list[nn.Module] = []
        if expansion != 1:
            layers.append(spec.conv_norm_act(in_channels, inner, 1))
        layers.append(spec.conv_norm_act(inner, inner, kernel, stride, spec.num_groups(inner)))
        if spec.se:
            base = in_channels if spec.se_base == "input" else inner
            layers.append(SqueezeExcitation(inner, max(1, base // _SE_RATIO), make_activation(spec.activation)))
        layers.append(ConvNormAct(spec.make_conv(inner, out_channels, 1), spec.make_norm(out_channels), nn.Identity()))
        self.block = nn.Sequential(*layers)
        self.last_norm = f"block.{len(layers) - 1}.1"
        self.has_shortcut = stride == 1 and in_channels == out_channels
        self.drop_connect = DropConnect(0.0, spec.drop_connect_per)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.block(x)
        if self.has_shortcut:
            y = x + self.drop_connect(y)
        return y


class EfficientNet(ReconvModel):
    """Stem, seven stages, a 1x1 top, global average pooling, one linear layer."""

    def __init__(self, spec: EfficientNetSpec) -> None:
        super().__init__()
        self.spec = spec
        is_small = spec.stem == "cifar"
        channels = spec.scaled_width(_STEM_CHANNELS)
        features: list[nn.Module] = [spec.conv_norm_act(spec.in_channels, channels, 3, 1 if is_small else 2)]
        for row, (expands, kernel, row_stride, planes, repeats) in enumerate(_ROWS):
            out_channels = spec.scaled_width(planes)
            first_stride = 1 if is_small and row == 1 else row_stride
            expansion = spec.expand_ratio if expands else 1
            blocks: list[nn.Module] = []
            for i in range(spec.scaled_depth(repeats)):
                stride = first_stride if i == 0 else 1
                blocks.append(MBConv(spec, channels, out_channels, expansion=expansion, kernel=kernel, stride=stride))
                channels = out_channels
            features.append(nn.Sequential(*blocks))
        if spec.top_width:
            top = spec.scaled_width(spec.top_width)
            features.append(spec.conv_norm_act(channels, top, 1))
            channels = top
        self.features = nn.Sequential(*features)
        self.classifier = nn.Sequential(Dropout(spec.dropout), nn.Linear(channels, spec.num_classes))
        self._set_drop_connect()
        self.init_scheme = InitScheme(spec.conv_init, spec.linear_init, zero_init_norms=self._zero_init_norms())

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        return self.head(self.features(images))

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The stem, every block, the top and the head."""
        parts: list[tuple[str, nn.Module]] = []
        for index, part in self.features.named_children():
            if isinstance(part, ConvNormAct):
                parts.append((f"features.{index}", part))
            else:
                parts += [(f"features.{index}.{i}", block) for i, block in part.named_children()]
        return [*parts, ("head", Stage(self.head, self.classifier))]

    def head(self, x: Tensor) -> Tensor:
        """Logits of the last layer's output."""
        logits: Tensor = self.classifier(self.global_avg_pool(x))
        return logits

    def _set_drop_connect(self) -> None:
        """Increase the drop rate linearly with depth."""
        blocks = [module for module in self.modules() if isinstance(module, MBConv)]
        for i, block in enumerate(blocks):
            block.drop_connect.rate = self.spec.drop_connect * i / len(blocks)

    def _zero_init_norms(self) -> frozenset[str]:
        """The norms whose weight is initialized to zero."""
        blocks = ((name, module) for name, module in self.named_modules() if isinstance(module, MBConv))
        return zero_gamma_norms(
            self.spec.zero_gamma, ((f"{name}.{block.last_norm}", block.has_shortcut) for name, block in blocks)
        )


def _size(
    width: float, depth: float, dropout: float, norm_eps: float = 1e-5, bn_momentum: float = 0.1
) -> EfficientNetSpec:
    return EfficientNetSpec(
        width_coefficient=width,
        depth_coefficient=depth,
        dropout=dropout,
        norm_eps=norm_eps,
        bn_momentum=bn_momentum,
    )


SPECS: Mapping[str, EfficientNetSpec] = {
    "efficientnet_b0": _size(1.0, 1.0, 0.2),
    "efficientnet_b1": _size(1.0, 1.1, 0.2),
    "efficientnet_b2": _size(1.1, 1.2, 0.3),
    "efficientnet_b3": _size(1.2, 1.4, 0.3),
    "efficientnet_b4": _size(1.4, 1.8, 0.4),
    "efficientnet_b5": _size(1.6, 2.2, 0.4, norm_eps=1e-3, bn_momentum=0.01),
    "efficientnet_b6": _size(1.8, 2.6, 0.5, norm_eps=1e-3, bn_momentum=0.01),
    "efficientnet_b7": _size(2.0, 3.1, 0.5, norm_eps=1e-3, bn_momentum=0.01),
    "efficientnet_cifar": EfficientNetSpec(width_coefficient=0.5, dropout=0.0, stem="cifar", num_classes=10),
}
