"""MixUp and CutMix in every mode, against a brute-force loop over samples, pixels and classes."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.transforms.mixup import mix_params
from reconv.data.transforms.train import TrainPreprocess
from reconv.recipe.parts.data import AugmentConfig, CutmixConfig, MixupConfig, PreprocessConfig

SIZE = 14  # not a power of two: areas are no round fractions
NUM_CLASSES = 7
COLOR = PreprocessConfig(size=SIZE, resize=None)
GROUPS = (6, 5, 3)

FOLDED = MixupConfig(alpha=0.4, mode="sample", lam_at_least_half=True)
FIXED = CutmixConfig(mode="fixed", lam=0.7, roll=2)
RANDOM = CutmixConfig(mode="random", lam=0.85, roll=2)
FORMS = {
    "mixup per batch": AugmentConfig(hflip=0, mixup=MixupConfig(alpha=0.4)),
    "mixup per batch, permuted": AugmentConfig(hflip=0, mixup=MixupConfig(alpha=0.4, partner="permutation")),
    "mixup per sample, folded": AugmentConfig(hflip=0, mixup=FOLDED),
    "cutmix beta": AugmentConfig(hflip=0, cutmix=CutmixConfig(alpha=1.0)),
    "cutmix random": AugmentConfig(hflip=0, cutmix=RANDOM),
    "cutmix fixed": AugmentConfig(hflip=0, cutmix=FIXED),
    "one of": AugmentConfig(hflip=0, mixup=FOLDED, cutmix=FIXED),
    "both": AugmentConfig(hflip=0, mixup=FOLDED, cutmix=FIXED, combine="both"),
    "both, permuted": AugmentConfig(
        hflip=0, mixup=MixupConfig(alpha=1.0, partner="permutation"), cutmix=RANDOM, combine="both"
    ),
}


def make_batch(augment: AugmentConfig, groups: tuple[int, ...] = GROUPS, first: int = 0, step: int = 2) -> Batch:
    positions = np.arange(first, first + sum(groups), dtype=np.int64)
    images = np.random.default_rng(1).integers(0, 256, (200, 3, SIZE, SIZE), dtype=np.uint8)[positions]
    params = mix_params(augment, 11, step, positions, groups, SIZE)
    tensors = {
        "images": torch.from_numpy(images),
        "targets": torch.from_numpy(positions % NUM_CLASSES),
        "flips": torch.zeros(len(positions), dtype=torch.bool),
        **{name: torch.from_numpy(array) for name, array in params.items()},
    }
    return Batch(tensors, torch.from_numpy(positions), groups)


def prepared(augment: AugmentConfig, batch: Batch, dtype: torch.dtype = torch.float64) -> Batch:
    return TrainPreprocess(COLOR, augment, NUM_CLASSES, dtype)(batch, 2)


def brute_force(batch: Batch) -> tuple[Tensor, Tensor]:
    """Blend, then paste, sample by sample and pixel by pixel; a label's weight is counted from the pixels."""
    plain = prepared(AugmentConfig(hflip=0), batch)["images"]
    blended, labels = torch.empty_like(plain), torch.zeros(len(batch), NUM_CLASSES, dtype=torch.float64)
    for row in range(len(batch)):
        own, partner = float(batch["mixup_weights"][row]), row + int(batch["mixup_offsets"][row])
        blended[row] = own * plain[row] + (1 - own) * plain[partner]
        labels[row, batch["targets"][row]] += own
        labels[row, batch["targets"][partner]] += 1 - own
    images, soft = blended.clone(), torch.zeros_like(labels)
    for row in range(len(batch)):
        left, top, right, bottom = batch["cutmix_boxes"][row].tolist()
        partner, num_pasted = row + int(batch["cutmix_offsets"][row]), 0
        for y in range(SIZE):
            for x in range(SIZE):
                if left <= x < right and top <= y < bottom:
                    images[row, :, y, x] = blended[partner, :, y, x]
                    num_pasted += 1
        share = num_pasted / SIZE**2
        soft[row] = (1 - share) * labels[row] + share * labels[partner]
    return images, soft


@pytest.mark.parametrize("form", FORMS)
def test_mixing_equals_brute_force_and_soft_targets_sum_to_1(form: str) -> None:
    for step in range(4):
        batch = make_batch(FORMS[form], step=step)
        result = prepared(FORMS[form], batch)
        images, soft = brute_force(batch)
        assert torch.allclose(result["images"], images, atol=1e-12)
        assert torch.allclose(result["soft_targets"], soft, atol=1e-12)
        assert torch.allclose(result["soft_targets"].sum(1), torch.ones(len(batch), dtype=torch.float64), atol=1e-12)
        assert torch.equal(result["targets"], batch["targets"])
        single = prepared(FORMS[form], batch, torch.float32)["soft_targets"]
        assert torch.allclose(single.sum(1), torch.ones(len(batch)), atol=1e-6)


@pytest.mark.parametrize("form", FORMS)
def test_partners_never_leave_their_group(form: str) -> None:
    batch = make_batch(FORMS[form])
    group_of = np.repeat(np.arange(len(GROUPS)), GROUPS)
    for name in ("mixup_offsets", "cutmix_offsets"):
        partners = np.arange(sum(GROUPS)) + batch[name].numpy()
        assert np.array_equal(group_of[partners], group_of)
        assert sorted(partners) == list(range(sum(GROUPS)))


@pytest.mark.parametrize("form", FORMS)
def test_any_split_into_whole_groups_gives_the_same_samples(form: str) -> None:
    augment = FORMS[form]
    whole = prepared(augment, make_batch(augment), torch.float32)
    for split in ([(6,), (5,), (3,)], [(6, 5), (3,)], [(6,), (5, 3)]):
        first, parts = 0, []
        for part in split:
            parts.append(prepared(augment, make_batch(augment, part, first), torch.float32))
            first += sum(part)
        for name in ("images", "soft_targets"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])


def test_rolled_partners_are_one_or_two_samples_before() -> None:
    batch = make_batch(FORMS["both"])
    rows = np.arange(sum(GROUPS))
    assert (rows + batch["mixup_offsets"].numpy()).tolist() == [5, 0, 1, 2, 3, 4, 10, 6, 7, 8, 9, 13, 11, 12]
    assert (rows + batch["cutmix_offsets"].numpy()).tolist() == [4, 5, 0, 1, 2, 3, 9, 10, 6, 7, 8, 12, 13, 11]


def test_mixup_and_cutmix_together_mix_four_labels_by_weight_and_area() -> None:
    augment = FORMS["both"].model_copy(update={"mixup": MixupConfig(alpha=1.0, mode="sample", lam_at_least_half=True)})
    positions = np.arange(6, dtype=np.int64)
    four = 0
    for step in range(20):
        batch = make_batch(augment, (6,), step=step)
        weights = batch["mixup_weights"].double()
        left, top, right, bottom = batch["cutmix_boxes"][0].tolist()
        area = (right - left) * (bottom - top) / SIZE**2
        soft = prepared(augment, batch)["soft_targets"]
        for row in range(6):
            expected = torch.zeros(NUM_CLASSES, dtype=torch.float64)
            other = (row - 2) % 6
            expected[positions[row]] += (1 - area) * weights[row]
            expected[positions[(row - 1) % 6]] += (1 - area) * (1 - weights[row])
            expected[positions[other]] += area * weights[other]
            expected[positions[(other - 1) % 6]] += area * (1 - weights[other])
            assert torch.allclose(soft[row], expected, atol=1e-12)
            four += int((soft[row] > 0).sum()) == 4
    assert four > 100


def test_lam_at_least_half_keeps_weights_above_a_half() -> None:
    plain, folded = (
        np.concatenate(
            [
                mix_params(
                    AugmentConfig(mixup=MixupConfig(alpha=0.4, mode="sample", lam_at_least_half=fold)),
                    0,
                    s,
                    np.arange(8),
                    (8,),
                    SIZE,
                )["mixup_weights"]
                for s in range(200)
            ]
        )
        for fold in (False, True)
    )
    assert plain.min() < 0.1
    assert np.allclose(folded, np.maximum(plain, 1 - plain))
    assert len(np.unique(folded)) > 1000


def boxes_of(cutmix: CutmixConfig, size: int, num_steps: int) -> np.ndarray:
    augment, positions = AugmentConfig(cutmix=cutmix), np.arange(4, dtype=np.int64)
    return np.stack(
        [mix_params(augment, 3, step, positions, (4,), size)["cutmix_boxes"][0] for step in range(num_steps)]
    )


def test_cutmix_fixed_always_cuts_a_box_of_the_same_size() -> None:
    boxes = boxes_of(CutmixConfig(mode="fixed", lam=0.75), 1000, 300)
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    whole = (boxes > 0).all(1) & (boxes < 1000).all(1)
    assert whole.sum() > 50
    assert set(widths[whole]) | set(heights[whole]) <= {499, 500, 501}
    assert (widths * heights)[~whole].max() <= 501**2  # at an edge a box is cut off, and counts for what is left
    assert (widths * heights).min() < 150_000


def test_cutmix_random_leaves_groups_uncut_as_often_as_published() -> None:
    keep, num_steps = 0.85, 3000
    boxes = boxes_of(CutmixConfig(mode="random", lam=keep), 1000, num_steps)
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    untouched = (widths * heights == 0).mean()
    assert abs(untouched - (1.55 * keep - 0.96)) < 0.03
    inside = (boxes > 0).all(1) & (boxes < 1000).all(1) & (widths * heights > 0)
    # 1 - lambda = -ln(u)/4 is exponential with mean 1/4; boxes that fit inside are the smaller ones.
    assert math.sqrt((widths * heights)[inside].mean() / 1e6) < 0.5
    assert (widths == heights)[inside].mean() > 0.4
    assert np.abs(widths - heights)[inside].max() <= 1
    assert boxes_of(CutmixConfig(mode="random", lam=0.0), 1000, 50).any(1).all(), "below 0.62 every group is cut"


def test_a_permutation_reaches_every_partner() -> None:
    augment = FORMS["mixup per batch, permuted"]
    seen = np.zeros((5, 5), int)
    for step in range(300):
        offsets = mix_params(augment, 0, step, np.arange(5, dtype=np.int64), (5,), SIZE)["mixup_offsets"]
        seen[np.arange(5), np.arange(5) + offsets] += 1
    assert seen.min() > 30
