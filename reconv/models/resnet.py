"""Residual networks (He et al., 2015): one description, every member of the family by its numbers.

Owns the blocks, the shortcuts and the stems. Refuses to know training. Invariant: parameter names are torchvision's,
so that weights go both ways; the CIFAR forms use the same names with three stages.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from reconv.errors import UsageError
from reconv.models.layers import BatchNorm2d
from reconv.models.network import Initialisation, Network, Spec, Stage, ZeroGamma


@dataclass(frozen=True, kw_only=True)
class ResNetSpec(Spec):
    """A residual network in numbers."""

    block: Literal["basic", "bottleneck"]
    depths: tuple[int, ...]  # blocks per stage
    width: int = 64  # channels of the first stage, doubled at each next one
    stem: Literal["imagenet", "cifar"] = "imagenet"  # 7x7 stride 2 and max-pool, or one 3x3
    shortcut: Literal["A", "B"] = "B"  # where shapes change: zero padding, or a projection
    zero_gamma: ZeroGamma = "never"  # blocks whose last norm starts at zero

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.width < 1 or not self.depths or min(self.depths) < 1:
            raise UsageError(f"a ResNet needs positive width and depths, not {self.width} and {self.depths}")

    def build(self) -> ResNet:
        """The network, with torch's own initial values."""
        return ResNet(self)


class PadShortcut(nn.Module):
    """Shortcut A: every second pixel, and zeros for the channels that the input does not have."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.stride = stride
        self.extra = out_channels - in_channels

    def forward(self, x: Tensor) -> Tensor:
        x = x[:, :, :: self.stride, :: self.stride]
        return F.pad(x, (0, 0, 0, 0, self.extra // 2, self.extra - self.extra // 2))


def _shortcut(spec: ResNetSpec, in_channels: int, out_channels: int, stride: int) -> nn.Module | None:
    """What carries the input past a block: nothing where shapes agree."""
    if stride == 1 and in_channels == out_channels:
        return None
    if spec.shortcut == "A":
        return PadShortcut(in_channels, out_channels, stride)
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, 1, stride, bias=False),
        BatchNorm2d(out_channels, spec.bn_eps, spec.bn_momentum),
    )


class BasicBlock(nn.Module):
    """Two 3x3 convolutions."""

    expansion = 1

    def __init__(self, spec: ResNetSpec, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, planes, 3, stride, padding=1, bias=False)
        self.bn1 = BatchNorm2d(planes, spec.bn_eps, spec.bn_momentum)
        self.conv2 = nn.Conv2d(planes, planes, 3, 1, padding=1, bias=False)
        self.bn2 = BatchNorm2d(planes, spec.bn_eps, spec.bn_momentum)
        self.downsample = _shortcut(spec, in_channels, planes, stride)
        self.last_norm = "bn2"

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = self.bn2(self.conv2(y))
        y = y + (x if self.downsample is None else self.downsample(x))
        return F.relu(y, inplace=True)


class Bottleneck(nn.Module):
    """1x1 down, 3x3 (which carries the stride: v1.5), 1x1 up."""

    expansion = 4

    def __init__(self, spec: ResNetSpec, in_channels: int, planes: int, stride: int) -> None:
        super().__init__()
        out_channels = planes * self.expansion
        self.conv1 = nn.Conv2d(in_channels, planes, 1, bias=False)
        self.bn1 = BatchNorm2d(planes, spec.bn_eps, spec.bn_momentum)
        self.conv2 = nn.Conv2d(planes, planes, 3, stride, padding=1, bias=False)
        self.bn2 = BatchNorm2d(planes, spec.bn_eps, spec.bn_momentum)
        self.conv3 = nn.Conv2d(planes, out_channels, 1, bias=False)
        self.bn3 = BatchNorm2d(out_channels, spec.bn_eps, spec.bn_momentum)
        self.downsample = _shortcut(spec, in_channels, out_channels, stride)
        self.last_norm = "bn3"

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.bn1(self.conv1(x)), inplace=True)
        y = F.relu(self.bn2(self.conv2(y)), inplace=True)
        y = self.bn3(self.conv3(y))
        y = y + (x if self.downsample is None else self.downsample(x))
        return F.relu(y, inplace=True)


class ResNet(Network):
    """Stem, stages of blocks, global average, one linear layer."""

    def __init__(self, spec: ResNetSpec) -> None:
        super().__init__()
        self.spec = spec
        is_imagenet = spec.stem == "imagenet"
        kernel, stride = (7, 2) if is_imagenet else (3, 1)
        self.conv1 = nn.Conv2d(spec.in_channels, spec.width, kernel, stride, padding=kernel // 2, bias=False)
        self.bn1 = BatchNorm2d(spec.width, spec.bn_eps, spec.bn_momentum)
        self.maxpool = nn.MaxPool2d(3, 2, padding=1) if is_imagenet else nn.Identity()
        block = BasicBlock if spec.block == "basic" else Bottleneck
        channels = spec.width
        self.layer_names = [f"layer{i + 1}" for i in range(len(spec.depths))]
        for i, (name, depth) in enumerate(zip(self.layer_names, spec.depths, strict=True)):
            planes = spec.width * 2**i
            blocks: list[nn.Module] = []
            for j in range(depth):
                blocks.append(block(spec, channels, planes, stride=2 if i > 0 and j == 0 else 1))
                channels = planes * block.expansion
            self.add_module(name, nn.Sequential(*blocks))
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(channels, spec.num_classes)
        self.initialisation = Initialisation(spec.conv_init, spec.linear_init, zero_norms=self._zero_norms())

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        x = self._stem(images)
        for name in self.layer_names:
            x = self.get_submodule(name)(x)
        return self._head(x)

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The stem, every block, the head."""
        stem = Stage(self._stem, self.conv1, self.bn1, self.maxpool)
        blocks = [
            (f"{name}.{index}", block)
            for name in self.layer_names
            for index, block in self.get_submodule(name).named_children()
        ]
        return [("stem", stem), *blocks, ("head", Stage(self._head, self.avgpool, self.fc))]

    def _stem(self, x: Tensor) -> Tensor:
        stem: Tensor = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        return stem

    def _head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.avgpool(x).flatten(1))
        return logits

    def _zero_norms(self) -> frozenset[str]:
        """The norms that the zero-gamma rule names."""
        names = set()
        for name, block in self.named_modules():
            if not isinstance(block, BasicBlock | Bottleneck):
                continue
            if self.spec.zero_gamma == "always" or (
                self.spec.zero_gamma == "no-projection" and block.downsample is None
            ):
                names.add(f"{name}.{block.last_norm}")
        return frozenset(names)


def _cifar(depth: int) -> ResNetSpec:
    """The 6n+2 networks for 32x32 images: 16, 32 and 64 channels, shortcut A."""
    n = (depth - 2) // 6
    return ResNetSpec(block="basic", depths=(n, n, n), width=16, stem="cifar", shortcut="A", num_classes=10)


_BASIC = ResNetSpec(block="basic", depths=(2, 2, 2, 2))
_BOTTLENECK = ResNetSpec(block="bottleneck", depths=(3, 4, 6, 3))

TABLE: Mapping[str, Spec] = {
    "resnet18": _BASIC,
    "resnet34": replace(_BASIC, depths=(3, 4, 6, 3)),
    "resnet50": _BOTTLENECK,
    "resnet101": replace(_BOTTLENECK, depths=(3, 4, 23, 3)),
    "resnet152": replace(_BOTTLENECK, depths=(3, 8, 36, 3)),
    "resnet8_cifar": _cifar(8),
    "resnet14_cifar": _cifar(14),
    "resnet20_cifar": _cifar(20),
    "resnet32_cifar": _cifar(32),
    "resnet44_cifar": _cifar(44),
    "resnet56_cifar": _cifar(56),
    "resnet110_cifar": _cifar(110),
}
