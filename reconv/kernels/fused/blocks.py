"""The blocks and models of `reconv.models` with their layers fused.

Each class adds no state to the one it derives from. Residual blocks pass a `DualUse` to each other; a model turns
it into a tensor before its head. A ResNet passes the unfinished sum of a bottleneck to the next one, whose first
convolution is computed with it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.kernels import dispatch
from reconv.kernels.conv_output import ConvOutput
from reconv.kernels.fused.conv1x1 import (
    conv1x1_norm_act,
    conv_norm_act,
    conv_statistics,
    is_plain_conv1x1,
    norm_act_conv1x1,
    norm_act_conv_output,
)
from reconv.kernels.fused.layers import max_pool_and_input
from reconv.kernels.fused.norm import (
    FusedBatchNorm2d,
    norm_act,
    norm_act_squeeze_excite,
    norm_relu_concat,
    norm_relu_split,
    supports_concat,
)
from reconv.kernels.fused.plain_layers import has_hooks
from reconv.kernels.fused.sums import (
    DualUse,
    PendingSum,
    computed,
    conv1x1_dual,
    conv_norm_act_pool,
    dual,
    norm_add_act,
    norm_squeeze_excite_add_relu,
    pending_norm_add_act,
    single,
)
from reconv.models.architecture import ReconvModel
from reconv.models.efficientnet import EfficientNet, MBConv
from reconv.models.googlenet import BasicConv2d, GoogLeNet, Inception
from reconv.models.layers.conv import ConvNormAct, SqueezeExcitation
from reconv.models.layers.dropout import DropConnect
from reconv.models.mobilenet import InvertedResidual, MobileNetV2
from reconv.models.resnet import BasicBlock, Bottleneck, PreBasicBlock, PreBottleneck, ResNet, ResNetBackbone

_IDENTITY = nn.Identity()


class FusedConvNormAct(ConvNormAct):
    def forward(self, x: Tensor | DualUse) -> Tensor:
        conv, norm, act = self
        return conv1x1_norm_act(conv, norm, single(x), act)


class FusedBasicBlock(BasicBlock):
    def forward(self, x: Tensor | DualUse) -> Any:
        y, shortcut = dual(x)
        y = norm_act(self.bn1, self.conv1(y), self.act1)
        last = ConvOutput(self.conv2(y))
        return computed(_residual_sum(self.bn2, last, self.se, self.drop_path, shortcut, self.downsample, self.act2))


class FusedBottleneck(Bottleneck):
    def forward(self, x: Tensor | DualUse) -> Any:
        return computed(self.forward_pending(x))

    def forward_pending(self, x: Tensor | DualUse | PendingSum) -> Any:
        """The output, where kernels support it as a sum that the next block computes with its first convolution."""
        (y, shortcut), stats = conv1x1_dual(x, self.conv1, self.bn1)
        y = norm_act(self.bn1, y, self.act1, stats)
        last = norm_act_conv_output(self.bn2, self.conv2(y), self.act2, self.conv3, self.bn3)
        return _residual_sum(self.bn3, last, self.se, self.drop_path, shortcut, self.downsample, self.act3)


def _residual_sum(
    norm: nn.Module,
    x: ConvOutput,
    se: nn.Module,
    drop_path: nn.Module,
    shortcut: Tensor,
    downsample: nn.Module | None,
    act: nn.Module,
) -> Any:
    """act(drop_path(se(norm(x))) + downsample(shortcut)); without stochastic depth as one operation, which may be
    left to be computed."""
    if isinstance(drop_path, DropConnect):
        return act(drop_path(se(norm(x.y))) + (shortcut if downsample is None else downsample(shortcut)))
    if not isinstance(se, SqueezeExcitation):
        return pending_norm_add_act(norm, x, shortcut, downsample, act)
    shortcut = shortcut if downsample is None else downsample(shortcut)
    return norm_squeeze_excite_add_relu(norm, x.y, se, shortcut, act, x.stats)


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
    def features(self, images: Tensor) -> Any:
        x: Any = self.stem(images)
        for block in self._blocks():
            if isinstance(block, FusedBottleneck) and not has_hooks(block):
                x = block.forward_pending(x)
            else:
                x = block(computed(x))
        return computed(x)

    def _blocks(self) -> Iterator[nn.Module]:
        """The blocks in order; a layer whose call does more than to apply its blocks is one of them."""
        for name in self.layer_names:
            layer = self.get_submodule(name)
            if type(layer) is nn.Sequential and not has_hooks(layer):
                yield from layer
            else:
                yield layer

    def stem(self, images: Tensor) -> Any:
        return conv_norm_act_pool(self.conv1, self.bn1, images, self.act1, self.maxpool)

    def final_norm(self, x: Any) -> Any:
        return norm_act(self.bn_last, x, self.act_last)


class GlobalAvgPoolKernels(ReconvModel):
    """A model whose global average pooling writes its gradient in channels_last."""

    def global_avg_pool(self, x: Tensor) -> Tensor:
        if self.training and dispatch.supports(x):
            from reconv.kernels.ops import global_avg_pool as ops

            if ops.supports(x):
                return ops.global_avg_pool(x).flatten(1)
        return super().global_avg_pool(x)


class FusedResNet(GlobalAvgPoolKernels, FusedResNetBackbone, ResNet):
    def head(self, x: Tensor | DualUse) -> Tensor:
        return super().head(single(x))


class FusedInvertedResidual(InvertedResidual):
    def forward(self, x: Tensor | DualUse) -> Any:
        y, shortcut = dual(x)
        *layers, depthwise, conv, norm = self.conv
        for layer in layers:
            y = layer(y)
        assert isinstance(depthwise, ConvNormAct)
        y, stats = conv_statistics(depthwise[0], depthwise[1], y)
        y = norm_act_conv1x1(depthwise[1], y, depthwise[2], conv, stats)
        return norm_add_act(norm, y, shortcut, None, _IDENTITY) if self.has_shortcut else norm(y)


class FusedMobileNetV2(GlobalAvgPoolKernels, MobileNetV2):
    pass


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
            y, stats = conv_statistics(middle[0], middle[1], y)
            y = norm_act_squeeze_excite(middle[1], y, middle[2], se, stats)
        else:
            for layer in layers:
                y = layer(y)
        if not self.has_shortcut:
            return project(y)
        if self.drop_connect.rate > 0:
            return shortcut + self.drop_connect(project(y))
        y, stats = conv_statistics(project[0], project[1], y)
        return norm_add_act(project[1], y, shortcut, None, project[2], stats)


class FusedEfficientNet(GlobalAvgPoolKernels, EfficientNet):
    def head(self, x: Tensor | DualUse) -> Tensor:
        return super().head(single(x))


class FusedBasicConv2d(BasicConv2d):
    def forward(self, x: Tensor) -> Tensor:
        return conv_norm_act(self.conv, self.bn, x, self.act)


class FusedInception(Inception):
    """The three 1x1 convolutions of the input are computed as one: no product is narrower than the tiles of a GPU.

    The norms write into the concatenation and read its gradient, and the pool's gradient is added to the convolution's.
    """

    def forward(self, x: Tensor) -> Tensor:
        branches = (self.branch1, *self.branch2, *self.branch3, self.branch4[1])
        layers = [m for m in branches if isinstance(m, BasicConv2d)]
        norms = [m.bn for m in layers if isinstance(m.bn, FusedBatchNorm2d) and type(m.act) is nn.ReLU]
        is_hooked = any(has_hooks(module) for module in self.modules() if module is not self)
        if is_hooked or len(norms) < 6 or not supports_concat(norms, x):
            return super().forward(x)
        if not all(is_plain_conv1x1(layers[i].conv) for i in (0, 1, 3)):
            return super().forward(x)
        one, three_reduce, three, five_reduce, five, project = layers
        pooled, x = max_pool_and_input(self.branch4[0], x)
        y = F.conv2d(x, torch.cat([layer.conv.weight for layer in (one, three_reduce, five_reduce)]))
        num_channels = sum(norms[i].num_features for i in (0, 2, 4, 5))
        out, y3, y5 = norm_relu_split([norms[i] for i in (0, 1, 3)], y, num_channels)
        outputs = [three.conv(y3), five.conv(y5), project.conv(pooled)]
        return norm_relu_concat(out, [norms[i] for i in (2, 4, 5)], outputs)


class FusedGoogLeNet(GlobalAvgPoolKernels, GoogLeNet):
    def conv_pool(self, layer: BasicConv2d, pool: nn.Module, x: Tensor) -> Tensor:
        if any(has_hooks(module) for module in (*layer.modules(), pool)):
            return super().conv_pool(layer, pool, x)
        return single(conv_norm_act_pool(layer.conv, layer.bn, x, layer.act, pool))
