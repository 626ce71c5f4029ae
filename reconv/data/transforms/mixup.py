"""MixUp and CutMix: their parameters, sampled on the host, and the mixing of a batch on the device.

The parameters of a group are a function of (seed, step, the group's first position, its size). Partners come from the
same group, so that any split into whole groups gives the same samples. Soft targets are the exact shares of the
pixels and sum to 1.

A roll by k takes the sample k places before in the group as partner (the first ones take the last). With both MixUp
and CutMix on, each group uses one of them with equal probability, or both: then CutMix cuts MixUp's images, and a
label mixes four classes. MixUp has one weight per group or per sample, CutMix one box per group. A group of one sample
is not mixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.random import generator, key, permutation
from reconv.data.dataset import I64, NamedArrays
from reconv.data.transforms.base import GroupTransform
from reconv.data.transforms.geometry import box_mask
from reconv.recipe.parts.data import AugmentConfig, CutmixConfig, MixupConfig

# Names of the parameters. Offsets are relative, so that they hold in any slice that keeps groups whole.
MIXUP_OFFSETS = "mixup_offsets"  # int64 [n]: row of MixUp's partner minus own row
MIXUP_WEIGHTS = "mixup_weights"  # float32 [n]: weight of the own image under MixUp; 1: not mixed
CUTMIX_OFFSETS = "cutmix_offsets"  # int64 [n]: row of CutMix's partner minus own row
CUTMIX_BOXES = "cutmix_boxes"  # int64 [n, 4]: left, top, right, bottom of what the partner fills; empty: not cut

F32 = npt.NDArray[np.float32]
_NO_BOX = (0, 0, 0, 0)


class Mix(GroupTransform):
    """MixUp and CutMix. Mixing adds `soft_targets`; `targets` stay the class indices."""

    @staticmethod
    def is_active(augment: AugmentConfig) -> bool:
        return augment.mixes

    def sample_groups(self, seed: int, step: int, positions: I64, groups: Sequence[int], size: int) -> NamedArrays:
        return mix_params(self.augment, seed, step, positions, groups, size)

    def apply(self, batch: Batch) -> Batch:
        images = mix_images(batch["images"], batch.tensors, self.augment)
        return self.apply_to_targets(batch).replace(images=images)

    def apply_to_targets(self, batch: Batch) -> Batch:
        size = batch["images"].shape[-1]
        soft = mix_targets(batch["targets"], batch.tensors, self.num_classes, self.augment, size, self.dtype)
        return batch.replace(soft_targets=soft)


def first_rows(batch: Batch, size: int) -> Batch:
    """The first rows of a batch as a batch of one group, whose images are not mixed with others."""
    tensors = {name: tensor[:size] for name, tensor in batch.tensors.items()}
    for name in {MIXUP_OFFSETS, CUTMIX_OFFSETS} & tensors.keys():
        tensors[name] = torch.zeros_like(tensors[name])
    return Batch(tensors, batch.positions[:size], (size,))


def mix_params(
    augment: AugmentConfig, seed: int, step: int, positions: I64, groups: Sequence[int], size: int
) -> dict[str, npt.NDArray[np.generic]]:
    """Partners, weight and box of every row of a micro-batch made of whole groups; empty when mixing is off."""
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
            weights[rows], boxes[rows] = _weights_and_box(augment, base, group, size)
            offsets[rows] = _partners(augment.mixup, base, group)
            cut_offsets[rows] = _rolled(group, augment.cutmix.roll)
        start += group
    return {
        MIXUP_OFFSETS: offsets,
        MIXUP_WEIGHTS: weights,
        CUTMIX_OFFSETS: cut_offsets,
        CUTMIX_BOXES: boxes,
    }


def _partners(mixup: MixupConfig, base: int, group: int) -> I64:
    """Each row's MixUp partner, relative to the row."""
    if mixup.partner == "roll":
        return _rolled(group, 1)
    return permutation(key(base, "partner"), group) - np.arange(group)


def _rolled(group: int, by: int) -> I64:
    rows = np.arange(group)
    return (rows - by) % group - rows


def _weights_and_box(augment: AugmentConfig, base: int, group: int, size: int) -> tuple[F32, Sequence[int]]:
    """The weights [group] and the box of one group."""
    rng = generator(base)
    coin, center_x, center_y = rng.random(3)
    mixup, cutmix = augment.mixup, augment.cutmix
    one_of = mixup.enabled and cutmix.enabled and augment.combine == "one-of"
    weights, box = np.ones(group, np.float32), _NO_BOX
    if mixup.enabled and not (one_of and coin >= 0.5):
        weights = _mixup_weights(mixup, rng, group)
    if cutmix.enabled and not (one_of and coin < 0.5):
        box = _cutmix_box(size, _kept_share(cutmix, rng), center_x, center_y)
    return weights, box


def _mixup_weights(mixup: MixupConfig, rng: np.random.Generator, group: int) -> F32:
    weights = rng.beta(mixup.alpha, mixup.alpha, group if mixup.mode == "sample" else 1)
    if mixup.lam_at_least_half:
        weights = np.maximum(weights, 1 - weights)
    return np.broadcast_to(weights.astype(np.float32), (group,))


def _kept_share(cutmix: CutmixConfig, rng: np.random.Generator) -> float:
    """The share of the own image that is meant to remain (a box cut off at the edge leaves more)."""
    if cutmix.mode == "beta":
        return float(rng.beta(cutmix.alpha, cutmix.alpha))
    if cutmix.mode == "fixed":
        return cutmix.lam
    coin, share = rng.random(2)
    # The constants make the mean share kept about `keep` (Graphcore's CutMix, version 1).
    return 1.0 if coin < 1.55 * cutmix.lam - 0.96 else max(0.0, 1 + math.log(1 - share) / 4)


def _cutmix_box(size: int, kept: float, center_x: float, center_y: float) -> tuple[int, int, int, int]:
    """A square box around a center, cut off at the edges of the image."""
    half = size * math.sqrt(1 - kept) / 2
    left, right = (min(size, max(0, round(center_x * size + side))) for side in (-half, half))
    top, bottom = (min(size, max(0, round(center_y * size + side))) for side in (-half, half))
    return left, top, right, bottom


def mix_images(images: Tensor, params: Mapping[str, Tensor], augment: AugmentConfig) -> Tensor:
    """Mixed images."""
    rows = torch.arange(len(images), device=images.device)
    if augment.mixup.enabled:
        own = params[MIXUP_WEIGHTS].to(images.dtype).view(-1, 1, 1, 1)
        images = images * own + images[rows + params[MIXUP_OFFSETS]] * (1 - own)
    if augment.cutmix.enabled:
        is_cut = box_mask(params[CUTMIX_BOXES], images.shape[-1])
        images = torch.where(is_cut, images[rows + params[CUTMIX_OFFSETS]], images)
    return images


def mix_targets(
    targets: Tensor,
    params: Mapping[str, Tensor],
    num_classes: int,
    augment: AugmentConfig,
    size: int,
    dtype: torch.dtype,
) -> Tensor:
    """Soft targets [n, num_classes] with the exact shares of the pixels, of images of this size."""
    rows = torch.arange(len(targets), device=targets.device)
    hot = targets if targets.is_floating_point() else torch.nn.functional.one_hot(targets, num_classes)
    soft = hot.to(dtype)
    if augment.mixup.enabled:
        share = params[MIXUP_WEIGHTS].to(dtype).view(-1, 1)
        soft = soft * share + soft[rows + params[MIXUP_OFFSETS]] * (1 - share)
    if augment.cutmix.enabled:
        left, top, right, bottom = params[CUTMIX_BOXES].unbind(1)
        share = 1 - ((right - left) * (bottom - top)).to(dtype).view(-1, 1) / (size * size)
        soft = soft * share + soft[rows + params[CUTMIX_OFFSETS]] * (1 - share)
    return soft
