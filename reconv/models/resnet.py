"""ResNets: the blocks, and the spec of every variant.

He et al., 2015 (v1: the stride is in the bottleneck's first 1x1; v1.5: in its 3x3) and 2016 (v2: norm and
activation come before each convolution); Xie et al., 2016 (ResNeXt: grouped 3x3); Zagoruyko and Komodakis, 2016
(wide); Hu et al., 2017 (squeeze and excitation). Parameter names are torchvision's, so weights can be exchanged with
torchvision; the CIFAR variants use the same names with three stages.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.models.architecture import InitScheme, ReconvModel, Spec, Stage, ZeroGamma
from reconv.models.layers.conv import SqueezeExcitation
from reconv.models.layers.dropout import DropConnect


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(Spec):
    """The options of a ResNet."""

    block: Literal["basic", "bottleneck"]
    """Kind of residual block."""
    depths: tuple[int, ...]
    """Blocks per stage."""
    version: Literal["v1", "v1.5", "v2"] = "v1.5"
    """Stride on the 1x1 (v1) or the 3x3 (v1.5) of a bottleneck, or pre-activation (v2)."""
    width: int = 64
    """Channels of the first stage, doubled at each next one."""
    groups: int = 1
    """Groups of the bottleneck's 3x3."""
    width_per_group: int = 64
    """Width per group of the bottleneck's 3x3, as in torchvision (base_width)."""
    stem: Literal["imagenet", "cifar", "deep"] = "imagenet"
    """First layers: 7x7 and max-pool (imagenet), 3x3 (cifar), or three 3x3 and max-pool (deep, as in ResNet-D)."""
    shortcut: Literal["A", "B"] = "B"
    """Option A (zero padding) or B (1x1 projection) of the paper."""
    project_first: bool = False
    """Use a projection shortcut in the first stage too, as in TensorFlow's models."""
    zero_gamma: ZeroGamma = "never"
    """Blocks that initialize the weight of their last norm to zero."""
    se_units: int = 0
    """Hidden units of squeeze and excitation; 0 is none."""
    se_ratio: int = 0
    """Hidden units of squeeze and excitation as the block's channels divided by this; 0 is none."""
    drop_path_rate: float = 0.0
    """Stochastic depth: rate of the last block; the rates of the others rise linearly from 0."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.depths:
            raise UsageError("model option depths needs at least one stage")
        if self.block == "basic" and (self.groups, self.width_per_group) != (1, 64):
            raise UsageError("groups and width_per_group belong to bottleneck blocks, and this ResNet has basic ones")
        if self.version == "v2" and self.zero_gamma != "never":
            raise UsageError(
                "zero_gamma cannot be used with version v2",
                why="there an activation follows the norm, and a ReLU of zero passes no gradient",
            )
        if self.se_units and self.se_ratio:
            raise UsageError("se_units and se_ratio cannot both be set", hint="set one of them to 0")

    def build(self) -> ResNet:
        """The model, with torch's default initialization."""
        return ResNet(self)

    def inner_width(self, planes: int) -> int:
        """Channels of a bottleneck's 3x3."""
        return int(planes * self.width_per_group / 64) * self.groups

    def make_se(self, channels: int) -> nn.Module:
        """The block's squeeze-and-excitation, or nn.Identity."""
        units = self.se_units or (channels // self.se_ratio if self.se_ratio else 0)
        return SqueezeExcitation(channels, units, nn.ReLU(inplace=True)) if units else nn.Identity()

    def make_drop_path(self, rate: float) -> nn.Module:
        """Module that drops a block's residual branch, or nn.Identity."""
        return DropConnect(rate) if rate > 0 else nn.Identity()

    def make_downsample(self, in_channels: int, out_channels: int, stride: int, is_first: bool) -> nn.Module | None:
        """The module that matches the shortcut's shape to the block's output; None if the shapes already match."""
        if stride == 1 and in_channels == out_channels and not (self.project_first and is_first):
            return None
        if self.shortcut == "A":
            return PadShortcut(in_channels, out_channels, stride)
        projection: list[nn.Module] = [self.make_conv(in_channels, out_channels, 1, stride)]
        if self.version != "v2":
            projection.append(self.make_norm(out_channels))
        return nn.Sequential(*projection)


class PadShortcut(nn.Module):
    """Shortcut option A: strided subsampling and zero-padded channels."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.pad_channels = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.pad_channels // 2, self.pad_channels - self.pad_channels // 2))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1
    last_norm = "bn2"

    def __init__(
        self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_first: bool, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.conv1 = spec.make_conv(in_channels, planes, 3, stride)
        self.bn1, self.act1 = spec.make_norm_act(planes, nn.ReLU(inplace=True))
        self.conv2 = spec.make_conv(planes, planes, 3)
        self.bn2 = spec.make_norm(planes)
        self.se = spec.make_se(planes)
        self.drop_path = spec.make_drop_path(drop_path_rate)
        self.downsample = spec.make_downsample(in_channels, planes, stride, is_first)
        self.act2 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.drop_path(self.se(self.bn2(self.conv2(x))))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        out: Tensor = self.act2(x + shortcut)
        return out


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (grouped in ResNeXt), 1x1 up."""

    expansion = 4
    last_norm = "bn3"

    def __init__(
        self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_first: bool, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__()
        inner, out_channels = spec.inner_width(planes), planes * self.expansion
        stride1, stride2 = (stride, 1) if spec.version == "v1" else (1, stride)
        self.conv1 = spec.make_conv(in_channels, inner, 1, stride1)
        self.bn1, self.act1 = spec.make_norm_act(inner, nn.ReLU(inplace=True))
        self.conv2 = spec.make_conv(inner, inner, 3, stride2, spec.groups)
        self.bn2, self.act2 = spec.make_norm_act(inner, nn.ReLU(inplace=True))
        self.conv3 = spec.make_conv(inner, out_channels, 1)
        self.bn3 = spec.make_norm(out_channels)
        self.se = spec.make_se(out_channels)
        self.drop_path = spec.make_drop_path(drop_path_rate)
        self.downsample = spec.make_downsample(in_channels, out_channels, stride, is_first)
        self.act3 = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x
        x = self.act1(self.bn1(self.conv1(x)))
        x = self.act2(self.bn2(self.conv2(x)))
        x = self.drop_path(self.se(self.bn3(self.conv3(x))))
        if self.downsample is not None:
            shortcut = self.downsample(shortcut)
        out: Tensor = self.act3(x + shortcut)
        return out


class PreBasicBlock(nn.Module):
    """The basic block of v2: norm and activation first, nothing after the sum."""

    expansion = 1

    def __init__(
        self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_first: bool, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__()
        self.bn1, self.act1 = spec.make_norm_act(in_channels, nn.ReLU(inplace=True))
        self.conv1 = spec.make_conv(in_channels, planes, 3, stride)
        self.bn2, self.act2 = spec.make_norm_act(planes, nn.ReLU(inplace=True))
        self.conv2 = spec.make_conv(planes, planes, 3)
        self.se = spec.make_se(planes)
        self.drop_path = spec.make_drop_path(drop_path_rate)
        self.downsample = spec.make_downsample(in_channels, planes, stride, is_first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(self.act2(self.bn2(y)))
        out: Tensor = shortcut + self.drop_path(self.se(y))
        return out


class PreBottleneck(nn.Module):
    """The bottleneck of v2; the projection reads the activated input and has no norm."""

    expansion = 4

    def __init__(
        self, spec: ResNetSpec, in_channels: int, planes: int, stride: int, is_first: bool, drop_path_rate: float = 0.0
    ) -> None:
        super().__init__()
        inner, out_channels = spec.inner_width(planes), planes * self.expansion
        self.bn1, self.act1 = spec.make_norm_act(in_channels, nn.ReLU(inplace=True))
        self.conv1 = spec.make_conv(in_channels, inner, 1)
        self.bn2, self.act2 = spec.make_norm_act(inner, nn.ReLU(inplace=True))
        self.conv2 = spec.make_conv(inner, inner, 3, stride, spec.groups)
        self.bn3, self.act3 = spec.make_norm_act(inner, nn.ReLU(inplace=True))
        self.conv3 = spec.make_conv(inner, out_channels, 1)
        self.se = spec.make_se(out_channels)
        self.drop_path = spec.make_drop_path(drop_path_rate)
        self.downsample = spec.make_downsample(in_channels, out_channels, stride, is_first)

    def forward(self, x: Tensor) -> Tensor:
        y = self.act1(self.bn1(x))
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(self.act2(self.bn2(y)))
        y = self.conv3(self.act3(self.bn3(y)))
        out: Tensor = shortcut + self.drop_path(self.se(y))
        return out


BLOCKS: Mapping[tuple[str, bool], type[BasicBlock | Bottleneck | PreBasicBlock | PreBottleneck]] = {
    ("basic", False): BasicBlock,
    ("bottleneck", False): Bottleneck,
    ("basic", True): PreBasicBlock,
    ("bottleneck", True): PreBottleneck,
}


class ResNetBackbone(ReconvModel):
    """Stem and stages of blocks; the first block of each stage has the stage's stride."""

    out_channels: int

    def __init__(self, spec: ResNetSpec, strides: Sequence[int]) -> None:
        super().__init__()
        self.spec = spec
        self.conv1 = _stem_conv(spec)
        self.bn1, self.act1 = _norm_act(spec, spec.width, enabled=spec.version != "v2")
        self.maxpool = nn.Identity() if spec.stem == "cifar" else spec.make_max_pool(3, 2, padding=1)
        block = BLOCKS[spec.block, spec.version == "v2"]
        channels = spec.width
        drop_path_rates = _linear_rates(spec.drop_path_rate, sum(spec.depths))
        self.layer_names = [f"layer{i + 1}" for i in range(len(spec.depths))]
        for i, (name, depth, stride) in enumerate(zip(self.layer_names, spec.depths, strides, strict=True)):
            planes = spec.width * 2**i
            blocks: list[nn.Module] = []
            for j in range(depth):
                rate = next(drop_path_rates)
                blocks.append(block(spec, channels, planes, stride if j == 0 else 1, j == 0, rate))
                channels = planes * block.expansion
            self.add_module(name, nn.Sequential(*blocks))
        self.bn_last, self.act_last = _norm_act(spec, channels, enabled=spec.version == "v2")
        self.out_channels = channels

    def features(self, images: Tensor) -> Tensor:
        """The last block's output for images [n, channels, height, width]."""
        x = self.stem(images)
        for name in self.layer_names:
            x = self.get_submodule(name)(x)
        return x

    def stem(self, images: Tensor) -> Tensor:
        """Everything before the first block."""
        x: Tensor = self.maxpool(self.act1(self.bn1(self.conv1(images))))
        return x

    def final_norm(self, x: Tensor) -> Tensor:
        """The norm and activation after the last block of v2; elsewhere x."""
        x = self.act_last(self.bn_last(x))
        return x

    def backbone_stages(self) -> list[tuple[str, nn.Module]]:
        """The stem and every block."""
        blocks = [
            (f"{name}.{index}", block)
            for name in self.layer_names
            for index, block in self.get_submodule(name).named_children()
        ]
        return [("stem", Stage(self.stem, self.conv1, self.bn1)), *blocks]

    def zero_init_norms(self) -> frozenset[str]:
        """The norms whose weight is initialized to zero; Graphcore's rule, no-projection, skips basic blocks."""
        rule = self.spec.zero_gamma
        return frozenset(
            f"{name}.{block.last_norm}"
            for name, block in self.named_modules()
            if (rule == "always" and isinstance(block, BasicBlock | Bottleneck))
            or (rule == "no-projection" and isinstance(block, Bottleneck) and block.downsample is None)
        )


class ResNet(ResNetBackbone):
    """The backbone, global average pooling and one linear layer."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__(spec, strides=(1, *(2,) * (len(spec.depths) - 1)))
        self.fc = nn.Linear(self.out_channels, spec.num_classes)
        self.init_scheme = InitScheme(spec.conv_init, spec.linear_init, zero_init_norms=self.zero_init_norms())

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        return self.head(self.features(images))

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The stem, every block, the head."""
        return [*self.backbone_stages(), ("head", Stage(self.head, self.bn_last, self.fc))]

    def head(self, x: Tensor) -> Tensor:
        """Logits of the last block's output."""
        x = self.final_norm(x)
        logits: Tensor = self.fc(self.global_avg_pool(x))
        return logits


def _linear_rates(last: float, num_blocks: int) -> Iterator[float]:
    """The drop rate of each block: from 0 for the first to `last`, as in timm."""
    return (last * number / max(1, num_blocks - 1) for number in range(num_blocks))


def _norm_act(spec: ResNetSpec, channels: int, enabled: bool) -> tuple[nn.Module, nn.Module]:
    return spec.make_norm_act(channels, nn.ReLU(inplace=True)) if enabled else (nn.Identity(), nn.Identity())


def _stem_conv(spec: ResNetSpec) -> nn.Module:
    """The convolutions before `bn1`."""
    if spec.stem == "imagenet":
        return spec.make_conv(spec.in_channels, spec.width, 7, 2)
    if spec.stem == "cifar":
        return spec.make_conv(spec.in_channels, spec.width, 3)
    half = spec.width // 2
    return nn.Sequential(
        spec.make_conv(spec.in_channels, half, 3, 2),
        spec.make_norm(half),
        nn.ReLU(inplace=True),
        spec.make_conv(half, half, 3),
        spec.make_norm(half),
        nn.ReLU(inplace=True),
        spec.make_conv(half, spec.width, 3),
    )


def _cifar_basic(depth: int) -> ResNetSpec:
    """The 6n+2 models for 32x32 images: 16, 32 and 64 channels, shortcut A."""
    n = (depth - 2) // 6
    return ResNetSpec(block="basic", depths=(n, n, n), width=16, stem="cifar", shortcut="A", num_classes=10)


def _cifar_bottleneck(depth: int) -> ResNetSpec:
    """The 9n+2 models: the same widths in bottlenecks, with projections."""
    n = (depth - 2) // 9
    return ResNetSpec(block="bottleneck", depths=(n, n, n), width=16, stem="cifar", num_classes=10)


def _cifar_resnext(depth: int, width: int = 16) -> ResNetSpec:
    """ResNeXt 32x4d for 32x32 images; the wide form starts at 64 channels."""
    return replace(_cifar_bottleneck(depth), groups=32, width_per_group=4, width=width)


_BASIC = ResNetSpec(block="basic", depths=(2, 2, 2, 2))
_BOTTLENECK = ResNetSpec(block="bottleneck", depths=(3, 4, 6, 3))
_RESNEXT = replace(_BOTTLENECK, groups=32, width_per_group=4)
_DEPTHS_101 = (3, 4, 23, 3)
_DEPTHS_152 = (3, 8, 36, 3)

# Depth 56 is both 6n+2 and 9n+2: resnet56_cifar is the published basic one.
SPECS: Mapping[str, ResNetSpec] = {
    "resnet10": replace(_BASIC, depths=(1, 1, 1, 1)),
    "resnet14": replace(_BOTTLENECK, depths=(1, 1, 1, 1)),
    "resnet18": _BASIC,
    "resnet26": replace(_BOTTLENECK, depths=(2, 2, 2, 2)),
    "resnet34": replace(_BASIC, depths=(3, 4, 6, 3)),
    "resnet50": _BOTTLENECK,
    "resnet101": replace(_BOTTLENECK, depths=_DEPTHS_101),
    "resnet152": replace(_BOTTLENECK, depths=_DEPTHS_152),
    "resnet200": replace(_BOTTLENECK, depths=(3, 24, 36, 3)),
    "resnext14_32x4d": replace(_RESNEXT, depths=(1, 1, 1, 1)),
    "resnext26_32x4d": replace(_RESNEXT, depths=(2, 2, 2, 2)),
    "resnext50_32x4d": _RESNEXT,
    "resnext101_32x4d": replace(_RESNEXT, depths=_DEPTHS_101),
    "resnext152_32x4d": replace(_RESNEXT, depths=_DEPTHS_152),
    "resnext101_32x8d": replace(_RESNEXT, depths=_DEPTHS_101, width_per_group=8),
    "wide_resnet50_2": replace(_BOTTLENECK, width_per_group=128),
    "wide_resnet101_2": replace(_BOTTLENECK, depths=_DEPTHS_101, width_per_group=128),
    "se_resnext101_32x4d": replace(_RESNEXT, depths=_DEPTHS_101, se_units=16),
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
    "resnext11_cifar": _cifar_resnext(11),
    "resnext29_cifar": _cifar_resnext(29),
    "resnext38_cifar": _cifar_resnext(38),
    "resnext47_cifar": _cifar_resnext(47),
    "resnext56_cifar": _cifar_resnext(56),
    "resnext65_cifar": _cifar_resnext(65),
    "resnext29_wide_cifar": _cifar_resnext(29, width=64),
}
