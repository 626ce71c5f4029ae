"""Residual networks: one description, every member of the family by its numbers.

He et al., 2015 (v1: the bottleneck's first 1x1 carries the stride; v1.5: its 3x3 does) and 2016 (v2: norm and
activation come before each convolution); Xie et al., 2016 (ResNeXt: grouped 3x3); Zagoruyko and Komodakis, 2016
(wide); Hu et al., 2017 (squeeze and excitation).

Owns the blocks, the shortcuts and the stems. Refuses to know training. Invariant: parameter names are torchvision's,
so that weights go both ways; the CIFAR forms use the same names with three stages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from reconv.errors import UsageError
from reconv.models.architecture import Initialisation, ReconvModel, Spec, Stage, ZeroGamma
from reconv.models.layers.norm import ACTIVATIONS, Fork, SqueezeExcitation, excited_join, fork, joined, normed, pooled

_relu = ACTIVATIONS["relu"]


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(Spec):
    """A residual network in numbers."""

    block: Literal["basic", "bottleneck"]
    depths: tuple[int, ...]  # blocks per stage
    version: Literal["v1", "v1.5", "v2"] = "v1.5"
    width: int = 64  # channels of the first stage, doubled at each next one
    groups: int = 1  # of the bottleneck's 3x3
    width_per_group: int = 64  # of the bottleneck's 3x3, at 64 planes
    stem: Literal["imagenet", "cifar", "deep"] = "imagenet"  # 7x7/2 and pool; one 3x3; three 3x3, /2, and pool
    shortcut: Literal["A", "B"] = "B"  # where shapes change: zero padding, or a projection
    project_first: bool = False  # a projection in the first stage too, as TensorFlow's programs have it
    zero_gamma: ZeroGamma = "never"  # blocks whose last norm starts at zero; no-projection: never basic ones
    se_units: int = 0  # squeeze and excitation of so many hidden units; 0: none
    se_ratio: int = 0  # or of the block's channels divided by this

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths:
            raise UsageError("model option depths needs at least one stage")
        if self.block == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise UsageError("groups and width_per_group belong to bottleneck blocks, and this ResNet has basic ones")
        if self.version == "v2" and self.zero_gamma != "never":
            raise UsageError(
                "zero_gamma does not go with version v2",
                why="there an activation follows the norm, and a ReLU of zero passes no gradient",
            )
        if self.se_units and self.se_ratio:
            raise UsageError("se_units and se_ratio say the same thing: give one of them")

    def build(self) -> ResNet:
        """The network, with torch's own initial values."""
        return ResNet(self)

    def inner_width(self, planes: int) -> int:
        """Channels of a bottleneck's 3x3."""
        return int(planes * self.width_per_group / 64) * self.groups

    def make_se(self, channels: int) -> SqueezeExcitation | None:
        """The block's squeeze and excitation, if it has one."""
        units = self.se_units or (channels // self.se_ratio if self.se_ratio else 0)
        return SqueezeExcitation(channels, units, _relu) if units else None

    def make_shortcut(self, in_channels: int, out_channels: int, stride: int, is_rank0: bool) -> nn.Module | None:
        """What carries the input past a block: nothing where shapes agree."""
        if stride == 1 and in_channels == out_channels and not (self.project_first and is_rank0):
            return None
        if self.shortcut == "A":
            return PadShortcut(in_channels, out_channels, stride)
        projection: list[nn.Module] = [self.make_conv(in_channels, out_channels, 1, stride)]
        if self.version != "v2":
            projection.append(self.make_norm(out_channels, activated=False))
        return nn.Sequential(*projection)


class PadShortcut(nn.Module):
    """Shortcut A: every second pixel, and zeros for the channels that the input does not have."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1
    last_norm = "bn2"

    def __init__(self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_rank0: bool) -> None:
        super().__init__()
        self.conv1 = spec.make_conv(in_channels, planes, 3, stride)
        self.bn1 = spec.make_norm(planes)
        self.conv2 = spec.make_conv(planes, planes, 3)
        self.bn2 = spec.make_norm(planes, activated=False)
        self.se = spec.make_se(planes)
        self.downsample = spec.make_shortcut(in_channels, planes, stride, is_rank0)

    def forward(self, x: Tensor | Fork) -> Tensor | Fork:
        main, shortcut = fork(x)
        y = normed(self.bn1, self.conv1(main), _relu)
        return _ended(self.bn2, self.conv2(y), self.se, shortcut, self.downsample)


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (grouped in ResNeXt), 1x1 up."""

    expansion = 4
    last_norm = "bn3"

    def __init__(self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_rank0: bool) -> None:
        super().__init__()
        inner, out_channels = spec.inner_width(planes), planes * self.expansion
        first, second = (stride, 1) if spec.version == "v1" else (1, stride)
        self.conv1 = spec.make_conv(in_channels, inner, 1, first)
        self.bn1 = spec.make_norm(inner)
        self.conv2 = spec.make_conv(inner, inner, 3, second, spec.groups)
        self.bn2 = spec.make_norm(inner)
        self.conv3 = spec.make_conv(inner, out_channels, 1)
        self.bn3 = spec.make_norm(out_channels, activated=False)
        self.se = spec.make_se(out_channels)
        self.downsample = spec.make_shortcut(in_channels, out_channels, stride, is_rank0)

    def forward(self, x: Tensor | Fork) -> Tensor | Fork:
        main, shortcut = fork(x)
        y = normed(self.bn1, self.conv1(main), _relu)
        y = normed(self.bn2, self.conv2(y), _relu)
        return _ended(self.bn3, self.conv3(y), self.se, shortcut, self.downsample)


def _ended(
    norm: nn.Module, y: Tensor, se: SqueezeExcitation | None, shortcut: Tensor, projection: nn.Module | None
) -> Tensor | Fork:
    """A block's output: its last norm, what weighs the channels, and the shortcut."""
    if se is None:
        return joined(norm, y, shortcut, projection, _relu)
    return excited_join(norm, y, se, shortcut if projection is None else projection(shortcut))


class PreBasicBlock(nn.Module):
    """The basic block of v2: norm and activation first, nothing after the sum."""

    expansion = 1

    def __init__(self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_rank0: bool) -> None:
        super().__init__()
        self.bn1 = spec.make_norm(in_channels)
        self.conv1 = spec.make_conv(in_channels, planes, 3, stride)
        self.bn2 = spec.make_norm(planes)
        self.conv2 = spec.make_conv(planes, planes, 3)
        self.se = spec.make_se(planes)
        self.downsample = spec.make_shortcut(in_channels, planes, stride, is_rank0)

    def forward(self, x: Tensor) -> Tensor:
        y = normed(self.bn1, x, _relu)
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(normed(self.bn2, y, _relu))
        y = y if self.se is None else self.se(y)
        out: Tensor = shortcut + y
        return out


class PreBottleneck(nn.Module):
    """The bottleneck of v2; the projection sees the activated input and has no norm."""

    expansion = 4

    def __init__(self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_rank0: bool) -> None:
        super().__init__()
        inner, out_channels = spec.inner_width(planes), planes * self.expansion
        self.bn1 = spec.make_norm(in_channels)
        self.conv1 = spec.make_conv(in_channels, inner, 1)
        self.bn2 = spec.make_norm(inner)
        self.conv2 = spec.make_conv(inner, inner, 3, stride, spec.groups)
        self.bn3 = spec.make_norm(inner)
        self.conv3 = spec.make_conv(inner, out_channels, 1)
        self.se = spec.make_se(out_channels)
        self.downsample = spec.make_shortcut(in_channels, out_channels, stride, is_rank0)

    def forward(self, x: Tensor) -> Tensor:
        y = normed(self.bn1, x, _relu)
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(normed(self.bn2, y, _relu))
        y = self.conv3(normed(self.bn3, y, _relu))
        y = y if self.se is None else self.se(y)
        out: Tensor = shortcut + y
        return out


BLOCKS: Mapping[tuple[str, bool], type[BasicBlock | Bottleneck | PreBasicBlock | PreBottleneck]] = {
    ("basic", False): BasicBlock,
    ("bottleneck", False): Bottleneck,
    ("basic", True): PreBasicBlock,
    ("bottleneck", True): PreBottleneck,
}


class Trunk(ReconvModel):
    """Stem and stages of blocks; the first block of each stage has the stage's stride."""

    channels: int  # of what comes out

    def __init__(self, spec: ResNetSpec, strides: Sequence[int]) -> None:
        super().__init__()
        self.spec = spec
        self.conv1 = _stem_conv(spec)
        if spec.version != "v2":
            self.bn1 = spec.make_norm(spec.width)
        self.maxpool = nn.Identity() if spec.stem == "cifar" else spec.make_max_pool(3, 2, padding=1)
        block = BLOCKS[spec.block, spec.version == "v2"]
        channels = spec.width
        self.layer_names = [f"layer{i + 1}" for i in range(len(spec.depths))]
        for i, (name, depth, stride) in enumerate(zip(self.layer_names, spec.depths, strides, strict=True)):
            planes = spec.width * 2**i
            blocks: list[nn.Module] = []
            for j in range(depth):
                blocks.append(block(spec, channels, planes, stride if j == 0 else 1, is_rank0=j == 0))
                channels = planes * block.expansion
            self.add_module(name, nn.Sequential(*blocks))
        if spec.version == "v2":
            self.bn_last = spec.make_norm(channels)
        self.channels = channels

    def features(self, images: Tensor) -> Tensor:
        """What the last stage says of images [n, channels, height, width]."""
        return fork(self._end(self._last_block(images))).main

    def _last_block(self, images: Tensor) -> Tensor | Fork:
        x: Tensor | Fork = self._stem(images)
        for name in self.layer_names:
            x = self.get_submodule(name)(x)
        return x

    def trunk_stages(self) -> list[tuple[str, nn.Module]]:
        """The stem and every block."""
        blocks = [
            (f"{name}.{index}", block)
            for name in self.layer_names
            for index, block in self.get_submodule(name).named_children()
        ]
        modules = (self.conv1,) if self.spec.version == "v2" else (self.conv1, self.bn1)
        return [("stem", Stage(self._stem, *modules)), *blocks]

    def end_modules(self) -> list[nn.Module]:
        """What `_end` needs."""
        return [self.bn_last] if self.spec.version == "v2" else []

    def _stem(self, x: Tensor) -> Tensor | Fork:
        x = self.conv1(x)
        if self.spec.version != "v2":
            return pooled(self.bn1, x, _relu, self.maxpool)
        stem: Tensor = self.maxpool(x)
        return stem

    def _end(self, x: Tensor | Fork) -> Tensor | Fork:
        return normed(self.bn_last, fork(x).main, _relu) if self.spec.version == "v2" else x

    def zero_norms(self) -> frozenset[str]:
        """The norms that the zero-gamma rule names; Graphcore's, no-projection, never touches basic blocks."""
        rule = self.spec.zero_gamma
        return frozenset(
            f"{name}.{block.last_norm}"
            for name, block in self.named_modules()
            if (rule == "always" and isinstance(block, BasicBlock | Bottleneck))
            or (rule == "no-projection" and isinstance(block, Bottleneck) and block.downsample is None)
        )


class ResNet(Trunk):
    """The trunk, a global average and one linear layer."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__(spec, strides=(1, *(2,) * (len(spec.depths) - 1)))
        self.fc = nn.Linear(self.channels, spec.num_classes)
        self.initialisation = Initialisation(spec.conv_init, spec.linear_init, zero_norms=self.zero_norms())

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        return self._pooled(self.features(images))

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The stem, every block, the head."""
        return [*self.trunk_stages(), ("head", Stage(self._head, *self.end_modules(), self.fc))]

    def _head(self, x: Tensor | Fork) -> Tensor:
        return self._pooled(fork(self._end(x)).main)

    def _pooled(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def _stem_conv(spec: ResNetSpec) -> nn.Module:
    """The convolutions before the first norm that has a name of its own."""
    if spec.stem == "imagenet":
        return spec.make_conv(spec.in_channels, spec.width, 7, 2)
    if spec.stem == "cifar":
        return spec.make_conv(spec.in_channels, spec.width, 3)
    half = spec.width // 2
    return nn.Sequential(
        spec.make_conv(spec.in_channels, half, 3, 2),
        spec.make_norm(half, activated=False),
        nn.ReLU(inplace=True),
        spec.make_conv(half, half, 3),
        spec.make_norm(half, activated=False),
        nn.ReLU(inplace=True),
        spec.make_conv(half, spec.width, 3),
    )


def _cifar_basic(depth: int) -> ResNetSpec:
    """The 6n+2 networks for 32x32 images: 16, 32 and 64 channels, shortcut A."""
    n = (depth - 2) // 6
    return ResNetSpec(block="basic", depths=(n, n, n), width=16, stem="cifar", shortcut="A", num_classes=10)


def _cifar_bottleneck(depth: int) -> ResNetSpec:
    """The 9n+2 networks: the same widths in bottlenecks, with projections."""
    n = (depth - 2) // 9
    return ResNetSpec(block="bottleneck", depths=(n, n, n), width=16, stem="cifar", num_classes=10)


def _cifar_next(depth: int, width: int = 16) -> ResNetSpec:
    """ResNeXt 32x4d for 32x32 images; the wide form starts at 64 channels."""
    return replace(_cifar_bottleneck(depth), groups=32, width_per_group=4, width=width)


_BASIC = ResNetSpec(block="basic", depths=(2, 2, 2, 2))
_BOTTLENECK = ResNetSpec(block="bottleneck", depths=(3, 4, 6, 3))
_NEXT = replace(_BOTTLENECK, groups=32, width_per_group=4)
_101 = (3, 4, 23, 3)
_152 = (3, 8, 36, 3)

# Depth 56 is both 6n+2 and 9n+2: resnet56_cifar is the published basic one, the other says bottleneck.
TABLE: Mapping[str, ResNetSpec] = {
    "resnet10": replace(_BASIC, depths=(1, 1, 1, 1)),
    "resnet14": replace(_BOTTLENECK, depths=(1, 1, 1, 1)),
    "resnet18": _BASIC,
    "resnet26": replace(_BOTTLENECK, depths=(2, 2, 2, 2)),
    "resnet34": replace(_BASIC, depths=(3, 4, 6, 3)),
    "resnet50": _BOTTLENECK,
    "resnet101": replace(_BOTTLENECK, depths=_101),
    "resnet152": replace(_BOTTLENECK, depths=_152),
    "resnet200": replace(_BOTTLENECK, depths=(3, 24, 36, 3)),
    "resnext14_32x4d": replace(_NEXT, depths=(1, 1, 1, 1)),
    "resnext26_32x4d": replace(_NEXT, depths=(2, 2, 2, 2)),
    "resnext50_32x4d": _NEXT,
    "resnext101_32x4d": replace(_NEXT, depths=_101),
    "resnext152_32x4d": replace(_NEXT, depths=_152),
    "resnext101_32x8d": replace(_NEXT, depths=_101, width_per_group=8),
    "wide_resnet50_2": replace(_BOTTLENECK, width_per_group=128),
    "wide_resnet101_2": replace(_BOTTLENECK, depths=_101, width_per_group=128),
    "se_resnext101_32x4d": replace(_NEXT, depths=_101, se_units=16),
    "resnet8_cifar": _cifar_basic(8),
    "resnet14_cifar": _cifar_basic(14),
    "resnet20_cifar": _cifar_basic(20),
    "resnet32_cifar": _cifar_basic(32),
    "resnet44_cifar": _cifar_basic(44),
    "resnet56_cifar": _cifar_basic(56),
    "resnet110_cifar": _cifar_basic(110),
    "resnet11_bottleneck_cifar": _cifar_bottleneck(11),
    "resnet29_bottleneck_cifar": _cifar_bottleneck(29),
    "resnet38_bottleneck_cifar": _cifar_bottleneck(38),
    "resnet47_bottleneck_cifar": _cifar_bottleneck(47),
    "resnet56_bottleneck_cifar": _cifar_bottleneck(56),
    "resnet65_bottleneck_cifar": _cifar_bottleneck(65),
    "resnext11_cifar": _cifar_next(11),
    "resnext29_cifar": _cifar_next(29),
    "resnext38_cifar": _cifar_next(38),
    "resnext47_cifar": _cifar_next(47),
    "resnext56_cifar": _cifar_next(56),
    "resnext65_cifar": _cifar_next(65),
    "resnext29_wide_cifar": _cifar_next(29, width=64),
}
