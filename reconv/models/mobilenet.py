"""MobileNetV2 (Sandler et al., 2018): inverted residuals with linear bottlenecks. Parameter names are torchvision's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor, nn

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
from reconv.models.layers.conv import Activation, ConvNormAct, make_activation
from reconv.models.layers.dropout import Dropout

# Table 2 of the paper: expansion, channels, repeats, first stride.
_ROWS = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
_STEM_CHANNELS = 32
_TOP_CHANNELS = 1280


def round_channels(channels: float, divisor: int) -> int:
    """The nearest multiple of the divisor, but not below 90% of the channels."""
    rounded = max(divisor, int(channels + divisor / 2) // divisor * divisor)
    return rounded + divisor if rounded < 0.9 * channels else rounded


@dataclass(frozen=True, kw_only=True)
class MobileNetV2Spec(Spec):
    """The options of MobileNetV2."""

    width_coefficient: float = 1.0
    """Factor of the channels of every layer."""
    depth_divisor: int = 8
    """Numbers of channels are multiples of it."""
    dropout: float = 0.2
    """Dropout rate before the classifier."""
    activation: Activation = "relu6"
    """Activation function."""
    stem: Stem = "imagenet"
    """First strides: 2 (imagenet), or 1 for the first two (cifar)."""
    zero_gamma: ZeroGamma = "never"
    """Blocks that initialize the weight of their last norm to zero; no-projection is those with a shortcut."""
    linear_init: LinearInit = "normal"
    """Initialization of linear layers."""

    def build(self) -> MobileNetV2:
        """The model, with torch's default initialization."""
        return MobileNetV2(self)

    def conv_norm_act(
        self, in_channels: int, out_channels: int, kernel: int, stride: int = 1, groups: int = 1
    ) -> ConvNormAct:
        """A convolution, its norm and the activation."""
        conv = self.make_conv(in_channels, out_channels, kernel, stride, groups)
        return ConvNormAct(conv, *self.make_norm_act(out_channels, make_activation(self.activation)))


class InvertedResidual(nn.Module):
    """1x1 up, depthwise 3x3, 1x1 down without activation; a shortcut where shapes agree."""

    def __init__(self, spec: MobileNetV2Spec, in_channels: int, out_channels: int, expansion: int, stride: int) -> None:
        super().__init__()
        inner = in_channels * expansion
        layers: list[nn.Module] = [spec.conv_norm_act(in_channels, inner, 1)] if expansion != 1 else []
        layers.append(spec.conv_norm_act(inner, inner, 3, stride, groups=inner))
        layers += [spec.make_conv(inner, out_channels, 1), spec.make_norm(out_channels)]
        self.conv = nn.Sequential(*layers)
        self.last_norm = f"conv.{len(layers) - 1}"
        self.has_shortcut = stride == 1 and in_channels == out_channels

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.has_shortcut else y


class MobileNetV2(ReconvModel):
    """Stem, inverted residuals, a 1x1 top, global average pooling, one linear layer."""

    def __init__(self, spec: MobileNetV2Spec) -> None:
        super().__init__()
        self.spec = spec
        channels = round_channels(_STEM_CHANNELS * spec.width_coefficient, spec.depth_divisor)
        is_small = spec.stem == "cifar"
        layers: list[nn.Module] = [spec.conv_norm_act(spec.in_channels, channels, 3, 1 if is_small else 2)]
        for row, (expansion, planes, repeats, row_stride) in enumerate(_ROWS):
            out_channels = round_channels(planes * spec.width_coefficient, spec.depth_divisor)
            first_stride = 1 if is_small and row == 1 else row_stride
            for i in range(repeats):
                stride = first_stride if i == 0 else 1
                layers.append(InvertedResidual(spec, channels, out_channels, expansion, stride))
                channels = out_channels
        top = round_channels(_TOP_CHANNELS * max(1.0, spec.width_coefficient), spec.depth_divisor)
        layers.append(spec.conv_norm_act(channels, top, 1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(Dropout(spec.dropout), nn.Linear(top, spec.num_classes))
        self.init_scheme = InitScheme(spec.conv_init, spec.linear_init, zero_init_norms=self._zero_init_norms())

    def forward(self, images: Tensor) -> Tensor:
        """Logits [n, classes] of images [n, channels, height, width]."""
        return self.head(self.features(images))

    def stages(self) -> list[tuple[str, nn.Module]]:
        """Every block, and the head."""
        blocks = [(f"features.{index}", block) for index, block in self.features.named_children()]
        return [*blocks, ("head", Stage(self.head, self.classifier))]

    def head(self, x: Tensor) -> Tensor:
        """Logits of the last convolution's output."""
        logits: Tensor = self.classifier(self.global_avg_pool(x))
        return logits

    def _zero_init_norms(self) -> frozenset[str]:
        """The norms whose weight is initialized to zero."""
        blocks = ((name, module) for name, module in self.named_modules() if isinstance(module, InvertedResidual))
        return zero_gamma_norms(
            self.spec.zero_gamma, ((f"{name}.{block.last_norm}", block.has_shortcut) for name, block in blocks)
        )


SPECS: Mapping[str, MobileNetV2Spec] = {"mobilenet_v2": MobileNetV2Spec()}
