"""The blocks and networks of `reconv.models` with their layers fused.

Each class adds no state to the one it derives from. Residual blocks pass a `DualUse` to each other; a network turns
it into a tensor before its head.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.kernels.fused_modules.fused_norm import (
    DualUse,
    FusedBatchNorm2d,
    dual,
    norm_act,
    norm_act_concat,
    norm_act_conv1x1,
    norm_act_pool,
    norm_act_squeeze_excite,
    norm_add_act,
    norm_squeeze_excite_add_relu,
    single,
)
from reconv.models.efficientnet import EfficientNet, MBConv
from reconv.models.googlenet import BasicConv2d, Inception
from reconv.models.layers.conv import ConvNormAct, SqueezeExcitation
from reconv.models.layers.dropout import DropConnect
from reconv.models.mobilenet import InvertedResidual
from reconv.models.resnet import BasicBlock, Bottleneck, PreBasicBlock, PreBottleneck, ResNet, ResNetBackbone

_IDENTITY = nn.Identity()


class FusedConvNormAct(ConvNormAct):
    def forward(self, x: Tensor | DualUse) -> Tensor:
        conv, norm, act = self
        return norm_act(norm, conv(single(x)), act)


class FusedBasicBlock(BasicBlock):
    def forward(self, x: Tensor | DualUse) -> Any:
        y, shortcut = dual(x)
        y = norm_act(self.bn1, self.conv1(y), self.act1)
        return _residual_sum(self.bn2, self.conv2(y), self.se, self.drop_path, shortcut, self.downsample, self.act2)


class FusedBottleneck(Bottleneck):
    def forward(self, x: Tensor | DualUse) -> Any:
        y, shortcut = dual(x)
        y = norm_act(self.bn1, self.conv1(y), self.act1)
        y = norm_act(self.bn2, self.conv2(y), self.act2)
        return _residual_sum(self.bn3, self.conv3(y), self.se, self.drop_path, shortcut, self.downsample, self.act3)


def _residual_sum(
    norm: nn.Module,
    y: Tensor,
    se: nn.Module,
    drop_path: nn.Module,
    shortcut: Tensor,
    downsample: nn.Module | None,
    act: nn.Module,
) -> Any:
    """act(drop_path(se(norm(y))) + downsample(shortcut)); without stochastic depth as one operation."""
    if isinstance(drop_path, DropConnect):
        return act(drop_path(se(norm(y))) + (shortcut if downsample is None else downsample(shortcut)))
    if not isinstance(se, SqueezeExcitation):
        return norm_add_act(norm, y, shortcut, downsample, act)
    shortcut = shortcut if downsample is None else downsample(shortcut)
    return norm_squeeze_excite_add_relu(norm, y, se, shortcut, act)


class FusedPreBasicBlock(PreBasicBlock):
    def forward(self, x: Tensor) -> Tensor:
        y = norm_act(self.bn1, x, self.act1)
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(norm_act(self.bn2, y, self.act2))
        out: Tensor = shortcut + self.drop_path(self.se(y))
        return out


class FusedPreBottleneck(PreBottleneck):
    def forward(self, x: Tensor) -> Tensor:
        y = norm_act(self.bn1, x, self.act1)
        shortcut = x if self.downsample is None else self.downsample(y)
        y = self.conv1(y)
        y = self.conv2(norm_act(self.bn2, y, self.act2))
        y = self.conv3(norm_act(self.bn3, y, self.act3))
        out: Tensor = shortcut + self.drop_path(self.se(y))
        return out


class FusedResNetBackbone(ResNetBackbone):
    def stem(self, images: Tensor) -> Any:
        return norm_act_pool(self.bn1, self.conv1(images), self.act1, self.maxpool)

    def final_norm(self, x: Any) -> Any:
        return norm_act(self.bn_last, x, self.act_last)


class FusedResNet(FusedResNetBackbone, ResNet):
    def head(self, x: Tensor | DualUse) -> Tensor:
        return super().head(single(x))


class FusedInvertedResidual(InvertedResidual):
    def forward(self, x: Tensor | DualUse) -> Any:
        y, shortcut = dual(x)
        *layers, depthwise, conv, norm = self.conv
        for layer in layers:
            y = layer(y)
        assert isinstance(depthwise, ConvNormAct)
        y = norm_act_conv1x1(depthwise[1], depthwise[0](y), depthwise[2], conv)
        return norm_add_act(norm, y, shortcut, None, _IDENTITY) if self.has_shortcut else norm(y)


class FusedMBConv(MBConv):
    def forward(self, x: Tensor | DualUse) -> Any:
        y, shortcut = dual(x)
        *layers, project = self.block
        assert isinstance(project, ConvNormAct)
        if isinstance(layers[-1], SqueezeExcitation):
            *layers, middle, se = layers
            assert isinstance(middle, ConvNormAct)
            for layer in layers:
                y = layer(y)
            y = norm_act_squeeze_excite(middle[1], middle[0](y), middle[2], se)
        else:
            for layer in layers:
                y = layer(y)
        if not self.has_shortcut:
            return project(y)
        if self.drop_connect.rate > 0:
            return shortcut + self.drop_connect(project(y))
        return norm_add_act(project[1], project[0](y), shortcut, None, project[2])


class FusedEfficientNet(EfficientNet):
    def head(self, x: Tensor | DualUse) -> Tensor:
        return super().head(single(x))


class FusedBasicConv2d(BasicConv2d):
    def forward(self, x: Tensor) -> Tensor:
        return norm_act(self.bn, self.conv(x), self.act)


class FusedInception(Inception):
    def forward(self, x: Tensor) -> Tensor:
        reduced = self._reduce(x)
        if reduced is None:
            return super().forward(x)
        one, three, five = reduced
        return torch.cat([one, self.branch2[1](three), self.branch3[1](five), self.branch4(x)], 1)

    def _reduce(self, x: Tensor) -> list[Tensor] | None:
        """The outputs of the three 1x1 convolutions of x, computed as one; None where kernels do not support it.

        The input is read once, its gradient needs no sum, and no product is narrower than the tiles of a GPU.
        """
        layers = (self.branch1, self.branch2[0], self.branch3[0])
        found = [(m.conv, m.bn) for m in layers if isinstance(m, BasicConv2d) and isinstance(m.bn, FusedBatchNorm2d)]
        norms = [norm for _, norm in found if isinstance(norm, FusedBatchNorm2d)]
        if len(norms) < len(layers) or not all(norm.supports(x) for norm in norms):
            return None
        y = F.conv2d(x, torch.cat([conv.weight for conv, _ in found]))
        if not norms[0].supports(y):
            return None
        first, *others = norm_act_concat(norms, y, "relu")
        # Copied here, else a convolution would copy its part forward and once more backward.
        return [first, *(part.contiguous(memory_format=torch.channels_last) for part in others)]
