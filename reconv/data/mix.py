"""MixUp and CutMix: what is drawn on the host, and what it does to a batch on the device.

Owns both sides. Refuses to know ranks, micro-batches and losses. Invariant: a group's draws are a function of (seed,
step, the group's first position) and of its size; a sample's partner is the one before it in its group (the first
takes the last), so nothing leaves the group and any split into whole groups gives the same samples.

With both on, each group uses one of them, drawn with equal chance. MixUp draws one weight per group, or one per
sample; CutMix one box per group. A group of one sample is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.data.source import I64
from reconv.keys import generator, key
from reconv.recipe.schema import Augment

# Rows of a batch that mixing needs; offsets are relative, so that they hold in any slice that keeps groups whole.
OFFSETS = "mix_offsets"  # int64 [n]: row of the partner minus own row
WEIGHTS = "mix_weights"  # float32 [n]: own share under MixUp, 1 where the group is cut
BOXES = "mix_boxes"  # int64 [n, 4]: left, top, right, bottom of what the partner fills; empty under MixUp

_NO_BOX = (0, 0, 0, 0)


def is_mixing(augment: Augment) -> bool:
    """Whether training images are mixed at all."""
    return augment.mixup.alpha > 0 or augment.cutmix.alpha > 0


def draw_mix(
    augment: Augment, seed: int, step: int, positions: I64, groups: Sequence[int], size: int
) -> dict[str, npt.NDArray[np.generic]]:
    """The partner, weight and box of every row of a micro-batch made of whole groups; nothing when mixing is off."""
    if not is_mixing(augment):
        return {}
    offsets = np.zeros(len(positions), np.int64)
    weights = np.ones(len(positions), np.float32)
    boxes = np.zeros((len(positions), 4), np.int64)
    start = 0
    for group in groups:
        if group > 1:
            rows = slice(start, start + group)
            offsets[rows] = -1
            offsets[start] = group - 1
            base = key(seed, "mixup", step, int(positions[start]))
            weights[rows], boxes[rows] = _draw_group(augment, base, group, size)
        start += group
    return {OFFSETS: offsets, WEIGHTS: weights, BOXES: boxes}


def _draw_group(augment: Augment, base: int, group: int, size: int) -> tuple[npt.NDArray[np.float32], Sequence[int]]:
    """Own shares [group] and the box of one group."""
    draws = generator(base)
    mixup, cutmix = augment.mixup, augment.cutmix
    coin, across, down = draws.random(3)
    if mixup.alpha > 0 and (cutmix.alpha == 0 or coin < 0.5):
        num_weights = group if mixup.per == "sample" else 1
        weights = draws.beta(mixup.alpha, mixup.alpha, num_weights).astype(np.float32)
        return np.broadcast_to(weights, (group,)), _NO_BOX
    half = size * math.sqrt(1 - draws.beta(cutmix.alpha, cutmix.alpha)) / 2
    left, right = (min(size, max(0, round(across * size + side))) for side in (-half, half))
    top, bottom = (min(size, max(0, round(down * size + side))) for side in (-half, half))
    return np.ones(group, np.float32), (left, top, right, bottom)


def apply_mix(
    images: Tensor, targets: Tensor, drawn: Mapping[str, Tensor], num_classes: int, augment: Augment
) -> tuple[Tensor, Tensor]:
    """Mixed images and soft targets [n, classes] whose weights are the exact shares of the pixels."""
    num_images, size = images.shape[0], images.shape[-1]
    partners = torch.arange(num_images, device=images.device) + drawn[OFFSETS]
    others = images[partners]
    weights = drawn[WEIGHTS].to(images.dtype)
    if augment.mixup.alpha > 0:
        own = weights.view(-1, 1, 1, 1)
        images = images * own + others * (1 - own)
    if augment.cutmix.alpha > 0:
        left, top, right, bottom = drawn[BOXES].view(-1, 4, 1, 1, 1).unbind(1)
        places = torch.arange(size, device=images.device)
        columns, rows = places.view(1, 1, 1, -1), places.view(1, 1, -1, 1)
        is_cut = (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)
        images = torch.where(is_cut, others, images)
        area = ((right - left) * (bottom - top)).view(-1)
        # A row is mixed or cut, never both: its other factor is exactly 1.
        weights = weights * (1 - area.to(images.dtype) / (size * size))
    own_class = torch.nn.functional.one_hot(targets, num_classes)
    share = weights.view(-1, 1)
    return images, own_class * share + own_class[partners] * (1 - share)
