"""MixUp and CutMix: what is drawn on the host, and what it does to a batch on the device.

Owns both sides. Refuses to know ranks, micro-batches and losses. Invariant: a group's draws are a function of (seed,
step, the group's first position) and of its size; partners are of the same group, so any split into whole groups
gives the same samples. Soft targets are the exact shares of the pixels and sum to 1.

A roll by k makes the sample k places before, in the group, the partner (the first ones take the last). With MixUp and
CutMix on, each group uses one of them, drawn with equal chance, or both: then MixUp's images are cut, and a label
mixes four classes. MixUp draws one weight per group, or one per sample; CutMix one box per group. A group of one
sample is left alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.data.dataset import I64
from reconv.random import generator, key, permutation
from reconv.recipe.data_fields import AugmentConfig, CutmixConfig, MixupConfig

# Rows of a batch that mixing needs; offsets are relative, so that they hold in any slice that keeps groups whole.
OFFSETS = "mix_offsets"  # int64 [n]: row of MixUp's partner minus own row
WEIGHTS = "mix_weights"  # float32 [n]: own share under MixUp, 1 where there is none
CUT_OFFSETS = "cut_offsets"  # int64 [n]: row of CutMix's partner minus own row
BOXES = "mix_boxes"  # int64 [n, 4]: left, top, right, bottom of what CutMix's partner fills; empty where there is none
DRAWN = (OFFSETS, WEIGHTS, CUT_OFFSETS, BOXES)

F32 = npt.NDArray[np.float32]
_NO_BOX = (0, 0, 0, 0)


def draw_mix(
    augment: AugmentConfig, seed: int, step: int, positions: I64, groups: Sequence[int], size: int
) -> dict[str, npt.NDArray[np.generic]]:
    """Partners, weight and box of every row of a micro-batch made of whole groups; nothing when mixing is off."""
    if not augment.mixes:
        return {}
    offsets, cut_offsets = np.zeros((2, len(positions)), np.int64)
    weights = np.ones(len(positions), np.float32)
    boxes = np.zeros((len(positions), 4), np.int64)
    start = 0
    for group in groups:
        if group > 1:
            rows = slice(start, start + group)
            base = key(seed, "mixup", step, int(positions[start]))
            weights[rows], boxes[rows] = _draw_group(augment, base, group, size)
            offsets[rows] = _partners(augment.mixup, base, group)
            cut_offsets[rows] = _rolled(group, augment.cutmix.roll)
        start += group
    return {OFFSETS: offsets, WEIGHTS: weights, CUT_OFFSETS: cut_offsets, BOXES: boxes}


def _partners(mixup: MixupConfig, base: int, group: int) -> I64:
    """Each row's MixUp partner, relative to the row."""
    if mixup.partner == "roll":
        return _rolled(group, 1)
    return permutation(key(base, "partner"), group) - np.arange(group)


def _rolled(group: int, by: int) -> I64:
    rows = np.arange(group)
    return (rows - by) % group - rows


def _draw_group(augment: AugmentConfig, base: int, group: int, size: int) -> tuple[F32, Sequence[int]]:
    """Own shares [group] and the box of one group."""
    draws = generator(base)
    coin, across, down = draws.random(3)
    mixup, cutmix = augment.mixup, augment.cutmix
    one_of = mixup.on and cutmix.on and augment.combine == "one-of"
    weights, box = np.ones(group, np.float32), _NO_BOX
    if mixup.on and not (one_of and coin >= 0.5):
        weights = _draw_weights(mixup, draws, group)
    if cutmix.on and not (one_of and coin < 0.5):
        box = _box(size, _draw_kept(cutmix, draws), across, down)
    return weights, box


def _draw_weights(mixup: MixupConfig, draws: np.random.Generator, group: int) -> F32:
    drawn = draws.beta(mixup.alpha, mixup.alpha, group if mixup.mode == "sample" else 1)
    if mixup.lam_at_least_half:
        drawn = np.maximum(drawn, 1 - drawn)
    return np.broadcast_to(drawn.astype(np.float32), (group,))


def _draw_kept(cutmix: CutmixConfig, draws: np.random.Generator) -> float:
    """The share of the image that a cut is meant to leave (a box at the edge leaves more)."""
    if cutmix.mode == "beta":
        return float(draws.beta(cutmix.alpha, cutmix.alpha))
    if cutmix.mode == "fixed":
        return cutmix.lam
    whole, share = draws.random(2)
    # The constants make the mean share kept about `keep` (Graphcore's CutMix, version 1).
    return 1.0 if whole < 1.55 * cutmix.lam - 0.96 else max(0.0, 1 + math.log(1 - share) / 4)


def _box(size: int, kept: float, across: float, down: float) -> tuple[int, int, int, int]:
    """A box of the image's aspect around a centre, cut off at the edges."""
    half = size * math.sqrt(1 - kept) / 2
    left, right = (min(size, max(0, round(across * size + side))) for side in (-half, half))
    top, bottom = (min(size, max(0, round(down * size + side))) for side in (-half, half))
    return left, top, right, bottom


def inside(boxes: Tensor, size: int) -> Tensor:
    """Which pixels lie in each row's box: bool [n, 1, size, size] from int64 [n, 4]."""
    left, top, right, bottom = boxes.view(-1, 4, 1, 1, 1).unbind(1)
    places = torch.arange(size, device=boxes.device)
    columns, rows = places.view(1, 1, 1, -1), places.view(1, 1, -1, 1)
    return (columns >= left) & (columns < right) & (rows >= top) & (rows < bottom)


def apply_mix(
    images: Tensor, targets: Tensor, drawn: Mapping[str, Tensor], num_classes: int, augment: AugmentConfig
) -> tuple[Tensor, Tensor]:
    """Mixed images and soft targets [n, classes] whose weights are the exact shares of the pixels."""
    num_images, size = images.shape[0], images.shape[-1]
    places = torch.arange(num_images, device=images.device)
    soft = torch.nn.functional.one_hot(targets, num_classes).to(images.dtype)
    if augment.mixup.on:
        partners = places + drawn[OFFSETS]
        weights = drawn[WEIGHTS].to(images.dtype)
        own, share = weights.view(-1, 1, 1, 1), weights.view(-1, 1)
        images = images * own + images[partners] * (1 - own)
        soft = soft * share + soft[partners] * (1 - share)
    if augment.cutmix.on:
        partners = places + drawn[CUT_OFFSETS]
        left, top, right, bottom = drawn[BOXES].unbind(1)
        images = torch.where(inside(drawn[BOXES], size), images[partners], images)
        share = 1 - ((right - left) * (bottom - top)).to(images.dtype).view(-1, 1) / (size * size)
        soft = soft * share + soft[partners] * (1 - share)
    return images, soft
