"""SSD (Liu et al., 2015) on a ResNet: feature maps of decreasing size, with a class head and a box head on each.

The backbone has the parameter names of its ResNet, so ResNet weights can be loaded. Predictions are ordered by map,
then by shape of the default box, then by row, then by column.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import torch
from torch import Tensor, nn

from reconv.core.errors import UsageError
from reconv.models.architecture import (
    ConvInit,
    InitScheme,
    Spec,
    SSDOutput,
    Stage,
    ZeroGamma,
    flatten_predictions,
)
from reconv.models.layers.conv import SameConv2d, SameMaxPool2d
from reconv.models.resnet import SPECS as RESNETS
from reconv.models.resnet import ResNetBackbone, ResNetSpec

NUM_STAGES = 3  # of the backbone
STRIDES = (1, 2, 1)  # of the stages: the third keeps the second's size

Maps = tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True)
class SSDSpec(Spec):
    """The options of an SSD; `num_classes` includes the background."""

    backbone: str = "resnet34"
    """Any ResNet, used up to its third stage."""
    depths: tuple[int, ...] | None = None
    """Blocks of the three stages; null is the backbone's own."""
    width: int | None = None
    """Channels of the first stage; null is the backbone's own."""
    boxes_per_cell: tuple[int, ...] = (4, 6, 6, 6, 4, 4)
    """Default boxes per cell of each map."""
    extra_widths: tuple[int, ...] = (512, 512, 256, 256, 256)
    """Channels of the extra maps."""
    num_halved: int = 3
    """Extra maps that halve the size; each of the others is two pixels smaller."""
    # A norm after each convolution of the extra maps. The published model has none: at initialization its
    # activations shrink 60-fold over five maps, which slows learning of large objects from scratch.
    extra_norms: bool = False
    """Put a norm after each convolution of the extra maps."""
    pool: Literal["same", "torch"] = "same"
    """Padding of the stem's max-pool; same is as published."""
    conv_init: ConvInit = "tf_fan_in"
    """Initialization of the backbone's convolutions; tf_ is TensorFlow's variance scaling."""
    zero_gamma: ZeroGamma = "always"
    """Blocks that initialize the weight of their last norm to zero."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.backbone not in RESNETS:
            raise UsageError(
                f"model option backbone cannot be {self.backbone!r}", hint=f"choose one of: {', '.join(RESNETS)}"
            )
        if self.depths is not None and len(self.depths) != NUM_STAGES:
            raise UsageError(f"model option depths has {len(self.depths)} stages", why=f"the backbone has {NUM_STAGES}")
        if self.num_classes < 2:
            raise UsageError("a detector has at least two classes", why="one of them is the background")
        if len(self.extra_widths) != len(self.boxes_per_cell) - 1:
            raise UsageError(
                f"model option extra_widths has {len(self.extra_widths)} maps after the backbone's, "
                f"but there are boxes for {len(self.boxes_per_cell)} maps in all",
                why="each map after the first has one entry in extra_widths",
                hint="give one width fewer than there are lists in detection.anchors.aspect_ratios",
            )

    def build(self) -> SSD:
        """The model, with torch's default initialization."""
        return SSD(self)

    def backbone_spec(self) -> ResNetSpec:
        """The ResNet whose first stages are the backbone."""
        whole = RESNETS[self.backbone]
        common = {name: getattr(self, name) for name in Spec.__dataclass_fields__}
        return replace(
            whole,
            **common,
            depths=self.depths or whole.depths[:NUM_STAGES],
            width=self.width or whole.width,
            zero_gamma="never" if whole.version == "v2" else self.zero_gamma,
        )

    def map_sides(self, size: int) -> tuple[int, ...]:
        """The side of each map for square inputs; raises UsageError if a map would be empty."""
        side = -(-size // self._backbone_stride())
        sides = [side]
        for i in range(len(self.extra_widths)):
            side = -(-side // 2) if i < self.num_halved else side - 2
            sides.append(side)
        if side < 1:
            raise UsageError(
                f"inputs of {size} pixels are too small for {len(sides)} maps",
                why=f"their sides would be {', '.join(str(side) for side in sides)}",
                hint="use larger inputs (data.preprocess.size), fewer maps (detection.anchors, "
                "model.options.extra_widths), or another model.options.num_halved",
            )
        return tuple(sides)

    def map_pitches(self, size: int) -> tuple[float, ...]:
        """The distance between the centers of neighboring cells of each map, relative to the input's side.

        Halved maps keep the pixel grid they came from; the others divide the input evenly, as published.
        """
        sides = self.map_sides(size)
        stride = self._backbone_stride()
        return tuple(stride * 2**i / size if i <= self.num_halved else 1 / side for i, side in enumerate(sides))

    def _backbone_stride(self) -> int:
        return (1 if RESNETS[self.backbone].stem == "cifar" else 4) * math.prod(STRIDES)


class Extra(nn.Sequential):
    """A smaller feature map from the one before: 1x1 to half the channels, then 3x3, each with bias and ReLU, and
    with a norm before the ReLU where the spec has `extra_norms`."""

    def __init__(self, spec: SSDSpec, in_channels: int, out_channels: int, is_halved: bool) -> None:
        half = out_channels // 2
        conv1 = nn.Conv2d(in_channels, half, 1)
        conv2 = SameConv2d(half, out_channels, 3, 2) if is_halved else nn.Conv2d(half, out_channels, 3)
        (norm1, act1), (norm2, act2) = self._norm_act(spec, half), self._norm_act(spec, out_channels)
        # Convolutions first, so that their keys are the same with and without norms.
        super().__init__(conv1, conv2, norm1, norm2, act1, act2)

    def forward(self, x: Tensor) -> Tensor:
        conv1, conv2, norm1, norm2, act1, act2 = self
        x = act1(norm1(conv1(x)))
        x = act2(norm2(conv2(x)))
        return x

    @staticmethod
    def _norm_act(spec: SSDSpec, channels: int) -> tuple[nn.Module, nn.Module]:
        relu = nn.ReLU(inplace=True)
        return spec.make_norm_act(channels, relu) if spec.extra_norms else (nn.Identity(), relu)


class SSD(ResNetBackbone):
    """The backbone's map and the extra maps, with a class head and a box head on each."""

    head_patterns = ("extras.*", "class_heads.*", "box_heads.*")

    def __init__(self, spec: SSDSpec) -> None:
        super().__init__(spec.backbone_spec(), STRIDES)
        if spec.pool == "same" and isinstance(self.maxpool, nn.MaxPool2d):
            self.maxpool = SameMaxPool2d(3, 2)
        self.num_classes = spec.num_classes
        self.boxes_per_cell = spec.boxes_per_cell
        channels = [self.out_channels, *spec.extra_widths]
        self.extras = nn.ModuleList(
            Extra(spec, before, after, is_halved=i < spec.num_halved)
            for i, (before, after) in enumerate(pairwise(channels))
        )
        pairs = list(zip(channels, spec.boxes_per_cell, strict=True))
        self.class_heads = nn.ModuleList(nn.Conv2d(c, b * spec.num_classes, 3, padding=1) for c, b in pairs)
        self.box_heads = nn.ModuleList(nn.Conv2d(c, b * 4, 3, padding=1) for c, b in pairs)
        added = (f"{name}.{child}" for name, part in self._added() for child, _ in part.named_modules())
        self.init_scheme = InitScheme(
            spec.conv_init, spec.linear_init, zero_init_norms=self.zero_init_norms(), glorot_convs=frozenset(added)
        )

    def forward(self, images: Tensor) -> SSDOutput:
        """Box deltas and class logits of every default box of images [n, channels, side, side]."""
        maps: Maps = (self.final_norm(self.features(images)),)
        for extra in self.extras:
            maps = (*maps, extra(maps[-1]))
        return self.heads(maps)

    def stages(self) -> list[tuple[str, nn.Module]]:
        """The stem, every block, each extra map, the heads; from the first map on, a tuple of maps is passed on."""
        first = ("maps", Stage(lambda x: (self.final_norm(x),), self.bn_last))
        extras = [(f"extras.{i}", Stage(_append_map(extra), extra)) for i, extra in enumerate(self.extras)]
        return [*self.backbone_stages(), first, *extras, ("heads", Stage(self.heads, self.class_heads, self.box_heads))]

    def heads(self, maps: Maps) -> SSDOutput:
        """Box deltas and class logits from the feature maps."""
        box_deltas = [flatten_predictions(head(x), 4) for head, x in zip(self.box_heads, maps, strict=True)]
        logits = [
            flatten_predictions(head(x), self.num_classes) for head, x in zip(self.class_heads, maps, strict=True)
        ]
        return SSDOutput(torch.cat(box_deltas, dim=1), torch.cat(logits, dim=1))

    def _added(self) -> list[tuple[str, nn.Module]]:
        return [("extras", self.extras), ("class_heads", self.class_heads), ("box_heads", self.box_heads)]


def _append_map(extra: nn.Module) -> Callable[[Maps], Maps]:
    return lambda maps: (*maps, extra(maps[-1]))


SPECS: Mapping[str, SSDSpec] = {"ssd_resnet34": SSDSpec(num_classes=81)}
