"""GoogLeNet (Szegedy et al., 2014) with batch norm after every convolution, as in torchvision.

The two auxiliary heads are computed in training only. Parameter names are torchvision's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.models.architecture import (
    AuxOutput,
    ConvInit,
    InitScheme,
    LinearInit,
    ReconvModel,
    Spec,
    Stage,
    Stem,
)
from reconv.models.layers.dropout import Dropout

AUX_WEIGHT = 0.3  # section 5 of the paper

# Table 1 of the paper: 1x1, 3x3 reduce, 3x3, 5x5 reduce, 5x5, pool projection.
_BLOCKS: Mapping[str, tuple[int, int, int, int, int, int]] = {
    "inception3a": (64, 96, 128, 16, 32, 32),
    "inception3b": (128, 128, 192, 32, 96, 64),
    "inception4a": (192, 96, 208, 16, 48, 64),
    "inception4b": (160, 112, 224, 24, 64, 64),
    "inception4c": (128, 128, 256, 24, 64, 64),
    "inception4d": (112, 144, 288, 32, 64, 64),
    "inception4e": (256, 160, 320, 32, 128, 128),
    "inception5a": (256, 160, 320, 32, 128, 128),
    "inception5b": (384, 192, 384, 48, 128, 128),
}
_AUX_AFTER = {"inception4a": ("aux1", 512), "inception4d": ("aux2", 528)}
_POOL_AFTER = {"inception3b": "maxpool3", "inception4e": "maxpool4"}


@dataclass(frozen=True, kw_only=True)
class GoogLeNetSpec(Spec):
    """The options of GoogLeNet."""

    aux_heads: bool = True
    """Train with the two auxiliary heads."""
    dropout: float = 0.2
    """Dropout rate before the classifier."""
    aux_dropout: float = 0.7
    """Dropout rate of the auxiliary heads."""
    large_kernel: Literal[3, 5] = 3
    """Kernel of the paper's 5x5 branch, which torchvision builds with 3x3."""
    transform_input: bool = False
    """Normalize images again, for weights trained with inputs of mean and std 0.5."""
    stem: Stem = "imagenet"
    """First layers: the paper's (imagenet), or one 3x3 of stride 1 and no pools before the first block (cifar)."""
    norm_eps: float = 1e-3
    """Epsilon of the norms."""
    conv_init: ConvInit = "truncated"
    """Initialization of convolutions; tf_ is TensorFlow's variance scaling."""
    linear_init: LinearInit = "truncated"
    """Initialization of linear layers."""

    def build(self) -> GoogLeNet:
        """The model, with torch's default initialization."""
        return GoogLeNet(self)


class BasicConv2d(nn.Module):
    """A convolution, its norm and ReLU."""

    def __init__(self, spec: Spec, in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> None:
        super().__init__()
        self.conv = spec.make_conv(in_channels, out_channels, kernel, stride)
        self.bn, self.act = spec.make_norm_act(out_channels, nn.ReLU(inplace=True))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.act(self.bn(self.conv(x)))
        return out


class Inception(nn.Module):
    """Four parallel branches, concatenated along the channels."""

    def __init__(self, spec: GoogLeNetSpec, in_channels: int, widths: tuple[int, int, int, int, int, int]) -> None:
        super().__init__()
        one, three_reduce, three, five_reduce, five, pooled = widths
        self.branch1 = BasicConv2d(spec, in_channels, one, 1)
        self.branch2 = nn.Sequential(
            BasicConv2d(spec, in_channels, three_reduce, 1), BasicConv2d(spec, three_reduce, three, 3)
        )
        self.branch3 = nn.Sequential(
            BasicConv2d(spec, in_channels, five_reduce, 1), BasicConv2d(spec, five_reduce, five, spec.large_kernel)
        )
        self.branch4 = nn.Sequential(
            spec.make_max_pool(3, 1, padding=1, ceil=True), BasicConv2d(spec, in_channels, pooled, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.branch1(x), self.branch2(x), self.branch3(x), self.branch4(x)], 1)


class InceptionAux(nn.Module):
    """An auxiliary classifier in the middle of the model."""

    def __init__(self, spec: GoogLeNetSpec, in_channels: int) -> None:
        super().__init__()
        self.conv = BasicConv2d(spec, in_channels, 128, 1)
        self.fc1 = nn.Linear(128 * 4 * 4, 1024)
        self.act = nn.ReLU(inplace=True)
        self.dropout = Dropout(spec.aux_dropout)
        self.fc2 = nn.Linear(1024, spec.num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(F.adaptive_avg_pool2d(x, 4))
        x = self.dropout(self.act(self.fc1(x.flatten(1))))
        logits: Tensor = self.fc2(x)
        return logits


class GoogLeNet(ReconvModel):
    """Stem, nine inception blocks, global average pooling, one linear layer; in training, two auxiliary heads."""

    def __init__(self, spec: GoogLeNetSpec) -> None:
        super().__init__()
        self.spec = spec
        is_small = spec.stem == "cifar"
        self.conv1 = BasicConv2d(spec, spec.in_channels, 64, 3 if is_small else 7, 1 if is_small else 2)
        self.maxpool1 = nn.Identity() if is_small else spec.make_max_pool(3, 2, ceil=True)
        self.conv2 = BasicConv2d(spec, 64, 64, 1)
        self.conv3 = BasicConv2d(spec, 64, 192, 3)
        self.maxpool2 = nn.Identity() if is_small else spec.make_max_pool(3, 2, ceil=True)
        channels = 192
        for name, widths in _BLOCKS.items():
            self.add_module(name, Inception(spec, channels, widths))
            channels = widths[0] + widths[2] + widths[4] + widths[5]
        self.maxpool3 = spec.make_max_pool(3, 2, ceil=True)
        self.maxpool4 = spec.make_max_pool(2, 2, ceil=True)
        if spec.aux_heads:
            for name, in_channels in _AUX_AFTER.values():
                self.add_module(name, InceptionAux(spec, in_channels))
        self.dropout = Dropout(spec.dropout)
        self.fc = nn.Linear(channels, spec.num_classes)
        self.init_scheme = InitScheme(spec.conv_init, spec.linear_init)

    def forward(self, images: Tensor) -> Tensor | AuxOutput:
        """Logits [n, classes] of images [n, channels, height, width]; in training with those of the auxiliary heads."""
        x = self._stem(images)
        auxiliary: list[Tensor] = []
        for name in _BLOCKS:
            x = self.get_submodule(name)(x)
            if name in _POOL_AFTER:
                x = self.get_submodule(_POOL_AFTER[name])(x)
            if name in _AUX_AFTER and self._has_auxiliary():
                auxiliary.append(self.get_submodule(_AUX_AFTER[name][0])(x))
        logits = self._head(x)
        return AuxOutput(logits, tuple(auxiliary), AUX_WEIGHT) if auxiliary else logits

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The stem, every block with its pool, the auxiliary heads, the head; auxiliary logits are passed on in a
        tuple."""
        stem = Stage(self._stem, self.conv1, self.conv2, self.conv3)
        parts: list[tuple[str, nn.Module]] = [("stem", stem)]
        for name in _BLOCKS:
            block = self.get_submodule(name)
            pool = self.get_submodule(_POOL_AFTER[name]) if name in _POOL_AFTER else nn.Identity()
            parts.append((name, Stage(_on_first(nn.Sequential(block, pool)), block)))
            if name in _AUX_AFTER and self.spec.aux_heads:
                head = self.get_submodule(_AUX_AFTER[name][0])
                parts.append((_AUX_AFTER[name][0], Stage(self._append(head), head)))
        return [*parts, ("head", Stage(self._finish, self.fc))]

    def _has_auxiliary(self) -> bool:
        return self.training and self.spec.aux_heads

    def _stem(self, x: Tensor) -> Tensor:
        if self.spec.transform_input:  # from ImageNet's mean and std to 0.5 and 0.5
            mean, std = x.new_tensor((0.485, 0.456, 0.406)), x.new_tensor((0.229, 0.224, 0.225))
            x = x * (std / 0.5).view(1, 3, 1, 1) + ((mean - 0.5) / 0.5).view(1, 3, 1, 1)
        x = self.conv_pool(self.conv1, self.maxpool1, x)
        return self.conv_pool(self.conv3, self.maxpool2, self.conv2(x))

    def conv_pool(self, layer: BasicConv2d, pool: nn.Module, x: Tensor) -> Tensor:
        """pool(layer(x))"""
        out: Tensor = pool(layer(x))
        return out

    def _head(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.dropout(self.global_avg_pool(x)))
        return logits

    def _append(self, head: nn.Module) -> Callable[[Any], Any]:
        """A stage that appends a head's logits to the tuple that is passed on."""

        def append(value: Any) -> Any:
            if not self._has_auxiliary():
                return value
            x, *others = value if isinstance(value, tuple) else (value,)
            return (x, *others, head(x))

        return append

    def _finish(self, value: Any) -> Tensor | AuxOutput:
        if isinstance(value, tuple):
            return AuxOutput(self._head(value[0]), tuple(value[1:]), AUX_WEIGHT)
        return self._head(value)


def _on_first(module: nn.Module) -> Callable[[Any], Any]:
    """A stage that applies the module to the first element of the tuple that is passed on."""

    def apply(value: Any) -> Any:
        return (module(value[0]), *value[1:]) if isinstance(value, tuple) else module(value)

    return apply


SPECS: Mapping[str, GoogLeNetSpec] = {"googlenet": GoogLeNetSpec()}
