"""SSD300 on torchvision's ResNet-34, in plain PyTorch: a baseline for our detector, which torchvision does not have.

The model is that of MLPerf's reference implementation (v0.6, single_stage_detector): ResNet-34 up to its third stage,
which keeps the size of the second, five extra maps, and two heads on each of the six maps. Anchors, matching and losses
are our own plain ones (`reconv.tasks.detection`).
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from reconv.models.architecture import SSDOutput, flatten_predictions

NAME = "torchvision resnet34 SSD"
LR = 2.5e-3  # MLPerf's for 32 images
_CHANNELS = (256, 512, 512, 256, 256, 256)  # of the maps, with sides of 38, 19, 10, 5, 3 and 1 for images of 300 px
_BOXES_PER_CELL = (4, 6, 6, 6, 4, 4)
_NUM_HALVED = 3  # extra maps that halve the size; each of the others is two pixels smaller


class SSD300(nn.Module):
    """Box deltas and class logits of 8,732 default boxes, in the order of our anchors."""

    def __init__(self, resnet34: Any, num_classes: int) -> None:
        """`resnet34` is torchvision's model; `num_classes` includes the background."""
        super().__init__()
        self.num_classes = num_classes
        first_block = resnet34.layer3[0]
        first_block.conv1.stride = first_block.downsample[0].stride = (1, 1)
        stem = (resnet34.conv1, resnet34.bn1, resnet34.relu, resnet34.maxpool)
        self.backbone = nn.Sequential(*stem, resnet34.layer1, resnet34.layer2, resnet34.layer3)
        self.extras = nn.ModuleList(
            _extra(before, after, is_halved=i < _NUM_HALVED) for i, (before, after) in enumerate(pairwise(_CHANNELS))
        )
        pairs = list(zip(_CHANNELS, _BOXES_PER_CELL, strict=True))
        self.box_heads = nn.ModuleList(nn.Conv2d(c, 4 * boxes, 3, padding=1) for c, boxes in pairs)
        self.class_heads = nn.ModuleList(nn.Conv2d(c, num_classes * boxes, 3, padding=1) for c, boxes in pairs)

    def forward(self, images: Tensor) -> SSDOutput:
        """The outputs for images [n, 3, 300, 300]."""
        maps = [self.backbone(images)]
        for extra in self.extras:
            maps.append(extra(maps[-1]))
        box_deltas = [flatten_predictions(head(x), 4) for head, x in zip(self.box_heads, maps, strict=True)]
        logits = [
            flatten_predictions(head(x), self.num_classes) for head, x in zip(self.class_heads, maps, strict=True)
        ]
        return SSDOutput(torch.cat(box_deltas, dim=1), torch.cat(logits, dim=1))


def _extra(in_channels: int, out_channels: int, is_halved: bool) -> nn.Module:
    """A smaller map: 1x1 to half the channels, then 3x3, each with bias and ReLU."""
    half = out_channels // 2
    conv = nn.Conv2d(half, out_channels, 3, stride=2, padding=1) if is_halved else nn.Conv2d(half, out_channels, 3)
    return nn.Sequential(nn.Conv2d(in_channels, half, 1), nn.ReLU(inplace=True), conv, nn.ReLU(inplace=True))


def build_ssd300(torchvision_models: Any, num_classes: int) -> nn.Module:
    """The detector for data of so many classes, from the module `torchvision.models`."""
    return SSD300(torchvision_models.resnet34(weights=None), num_classes + 1)
