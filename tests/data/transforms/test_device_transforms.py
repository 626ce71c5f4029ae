"""Transforms on the device: normalizing, flipping, erasing, mixing."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from data_examples import noise
from torch import Tensor

from reconv.core.batch import Batch
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.digits import open_digits
from reconv.data.transforms.geometry import erase_boxes
from reconv.data.transforms.mixup import mix_params
from reconv.data.transforms.normalize import EvalPreprocess, denormalize
from reconv.data.transforms.train import TrainPreprocess
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import (
    AugmentConfig,
    CutmixConfig,
    DataConfig,
    MixupConfig,
    PreprocessConfig,
    RandomErasingConfig,
)
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

SIZE = 16


COLOR = PreprocessConfig(size=SIZE, resize=None)


GRAY = PreprocessConfig(size=SIZE, resize=None, channels=1, mean=(0.5,), std=(0.25,))


MIXUP = AugmentConfig(hflip=0, mixup=MixupConfig(alpha=0.7))


PER_SAMPLE = AugmentConfig(hflip=0, mixup=MixupConfig(alpha=0.7, mode="sample"))


CUTMIX = AugmentConfig(hflip=0, cutmix=CutmixConfig(alpha=1.0))


BOTH = AugmentConfig(hflip=0.5, mixup=MixupConfig(alpha=0.7), cutmix=CutmixConfig(alpha=1.0))


def make_batch(
    augment: AugmentConfig, groups: tuple[int, ...], step: int = 3, first: int = 0, channels: int = 3
) -> Batch:
    """A batch whose positions start at `first`, with the loader's parameters."""
    count = sum(groups)
    positions = np.arange(first, first + count, dtype=np.int64)
    rng = np.random.default_rng(1)
    images = rng.integers(0, 256, (1000, channels, SIZE, SIZE), dtype=np.uint8)[positions]
    params = mix_params(augment, 9, step, positions, groups, SIZE)
    tensors = {
        "images": torch.from_numpy(images),
        "targets": torch.from_numpy(positions % 5),
        "flips": torch.from_numpy(positions % 3 == 0),
        **{name: torch.from_numpy(array) for name, array in params.items()},
    }
    return Batch(tensors, torch.from_numpy(positions), groups)


def prepared(augment: AugmentConfig, batch: Batch, dtype: torch.dtype = torch.float64) -> Batch:
    return TrainPreprocess(COLOR, augment, 5, dtype)(batch, 3)


def test_images_are_normalized_per_channel() -> None:
    batch = make_batch(AugmentConfig(hflip=0), (4,))
    expected = torch.empty(4, 3, SIZE, SIZE, dtype=torch.float64)
    for channel in range(3):
        expected[:, channel] = (batch["images"][:, channel].double() / 255 - COLOR.mean[channel]) / COLOR.std[channel]
    for dtype, tolerance in ((torch.float64, 1e-12), (torch.float32, 1e-6), (torch.bfloat16, 2e-2)):
        images = EvalPreprocess(COLOR, dtype)(batch)["images"]
        assert images.dtype == dtype
        assert torch.allclose(images.double(), expected, atol=tolerance)
        assert torch.equal(images, TrainPreprocess(COLOR, AugmentConfig(hflip=0), 5, dtype)(batch, 0)["images"])


def test_means_of_0_to_255_are_subtracted_without_division() -> None:
    tensorflow = PreprocessConfig(
        size=SIZE, resize=None, divide_by=1, mean=(123.68, 116.78, 103.94), std=(1.0, 1.0, 1.0)
    )
    batch = make_batch(AugmentConfig(hflip=0), (4,))
    images = EvalPreprocess(tensorflow, torch.float64)(batch)["images"]
    means = torch.tensor([123.68, 116.78, 103.94], dtype=torch.float64).view(1, 3, 1, 1)
    assert torch.allclose(images, batch["images"].double() - means, atol=1e-12)
    assert torch.equal(denormalize(images, tensorflow), batch["images"])


def test_standardized_images_have_mean_0_and_std_1_and_flat_ones_are_0() -> None:
    images = make_batch(AugmentConfig(), (5,))["images"]
    images[4] = 200
    batch = Batch({"images": images}, torch.arange(5), (5,))
    preprocess = PreprocessConfig(size=SIZE, resize=None, per_image_standardization=True)
    result = EvalPreprocess(preprocess, torch.float64)(batch)["images"]
    assert torch.allclose(result[:4].mean((1, 2, 3)), torch.zeros(4, dtype=torch.float64), atol=1e-12)
    assert torch.allclose(result[:4].std((1, 2, 3), correction=0), torch.ones(4, dtype=torch.float64), atol=1e-12)
    assert not result[4].any()
    single = EvalPreprocess(preprocess, torch.float32)(Batch({"images": images[:1]}, torch.arange(1), (1,)))["images"]
    assert torch.equal(single, EvalPreprocess(preprocess, torch.float32)(batch)["images"][:1])


def test_only_rows_with_a_flip_are_flipped() -> None:
    batch = make_batch(AugmentConfig(), (6,))
    plain = prepared(AugmentConfig(hflip=0), batch)["images"]
    flipped = prepared(AugmentConfig(hflip=0.5), batch)["images"]
    for row in range(6):
        assert torch.equal(flipped[row], plain[row].flip(-1) if row % 3 == 0 else plain[row])


def test_channels_last_changes_only_the_memory_format() -> None:
    batch = make_batch(BOTH, (4,))
    last = TrainPreprocess(COLOR, BOTH, 5, torch.float32, channels_last=True)(batch, 3)["images"]
    assert last.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(last, prepared(BOTH, batch, torch.float32)["images"])


@pytest.mark.parametrize("augment", [MIXUP, PER_SAMPLE])
def test_mixup_blends_images_and_labels_by_the_same_weight(augment: AugmentConfig) -> None:
    groups = (4, 3, 6)
    batch = make_batch(augment, groups)
    plain, mixed = prepared(AugmentConfig(hflip=0), batch)["images"], prepared(augment, batch)
    row = 0
    shares = []
    for group in groups:
        for inside in range(group):
            partner = row + (group - 1 if inside == 0 else -1)
            own = float(batch["mixup_weights"][row])
            shares.append(own)
            assert torch.allclose(mixed["images"][row], own * plain[row] + (1 - own) * plain[partner], atol=1e-12)
            expected = torch.zeros(5, dtype=torch.float64)
            expected[row % 5] += own
            expected[partner % 5] += 1 - own
            assert torch.allclose(mixed["soft_targets"][row], expected, atol=1e-12)
            row += 1
    assert torch.equal(mixed["targets"], batch["targets"])
    assert len(set(shares)) == (3 if augment is MIXUP else 13)


def test_cutmix_label_weights_are_the_exact_fractions_of_pixels() -> None:
    areas = set()
    for step in range(30):
        batch = make_batch(CUTMIX, (4, 3), step=step, first=step * 7)
        plain, mixed = prepared(AugmentConfig(hflip=0), batch)["images"], prepared(CUTMIX, batch)
        for row in range(7):
            partner = {0: 3, 4: 6}.get(row, row - 1)
            from_self = (mixed["images"][row] == plain[row]).all(0)
            from_partner = (mixed["images"][row] == plain[partner]).all(0)
            assert (from_self ^ from_partner).all()
            share = int(from_self.sum()) / SIZE**2
            areas.add(share)
            expected = torch.zeros(5, dtype=torch.float64)
            expected[batch["targets"][row]] += share
            expected[batch["targets"][partner]] += 1 - share
            assert torch.allclose(mixed["soft_targets"][row], expected, atol=1e-15)
    assert len(areas) > 20


def test_with_mixup_and_cutmix_each_group_uses_one_of_them() -> None:
    cut = mixed = 0
    for step in range(200):
        params = mix_params(BOTH, 0, step, np.arange(step * 2, step * 2 + 2, dtype=np.int64), (2,), SIZE)
        is_cut = bool((params["mixup_weights"] == 1).all())
        assert is_cut or not params["cutmix_boxes"].any()
        cut, mixed = cut + is_cut, mixed + (not is_cut)
    assert 70 < cut < 130
    assert cut + mixed == 200


def test_a_group_of_one_is_not_mixed() -> None:
    for augment in (MIXUP, PER_SAMPLE, CUTMIX):
        batch = make_batch(augment, (1, 1))
        result = prepared(augment, batch)
        assert torch.equal(result["images"], prepared(AugmentConfig(hflip=0), batch)["images"])
        assert torch.equal(result["soft_targets"], torch.nn.functional.one_hot(batch["targets"], 5).double())


@pytest.mark.parametrize("augment", [MIXUP, PER_SAMPLE, CUTMIX, BOTH])
def test_mixing_does_not_depend_on_the_micro_batch(augment: AugmentConfig) -> None:
    groups = (4, 4, 3)
    whole = prepared(augment, make_batch(augment, groups), torch.float32)
    for split in ([(4,), (4,), (3,)], [(4, 4), (3,)], [(4,), (4, 3)]):
        first, parts = 0, []
        for part in split:
            parts.append(prepared(augment, make_batch(augment, part, first=first), torch.float32))
            first += sum(part)
        for name in ("images", "soft_targets"):
            assert torch.equal(torch.cat([part[name] for part in parts]), whole[name])
    sliced = [prepared(augment, group, torch.float32)["images"] for group in make_batch(augment, groups).by_group()]
    assert torch.equal(torch.cat(sliced), whole["images"])


def test_mixing_changes_with_step_seed_and_group() -> None:
    positions = np.arange(8, dtype=np.int64)
    first = mix_params(MIXUP, 0, 0, positions, (4, 4), SIZE)["mixup_weights"]
    assert first[0] != first[4]
    assert mix_params(MIXUP, 0, 1, positions, (4, 4), SIZE)["mixup_weights"][0] != first[0]
    assert mix_params(MIXUP, 1, 0, positions, (4, 4), SIZE)["mixup_weights"][0] != first[0]
    assert np.array_equal(mix_params(MIXUP, 0, 0, positions, (4, 4), SIZE)["mixup_weights"], first)


def test_batches_of_the_loader_are_mixed_alike_at_any_micro_batch() -> None:
    dataset = open_digits("train")
    outputs = []
    for micro in (8, 16, 32):
        recipe = Recipe(
            data=DataConfig(preprocess=GRAY, num_workers=0),
            augment=BOTH.model_copy(update={"crop": "pad"}),
            batch=BatchConfig(size=32, group=8, micro=micro),
        )
        plan = make_plan(recipe, Facts(len(dataset), 1, 10))
        prepare = TrainPreprocess(GRAY, recipe.augment, 10, torch.float32)
        (step,) = list(make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(7, 8))
        assert len(step) == 32 // micro
        ready = [prepare(batch, 7) for batch in step]
        outputs.append({n: torch.cat([batch[n] for batch in ready]) for n in ("images", "soft_targets")})
    for output in outputs[1:]:
        assert all(torch.equal(output[name], outputs[0][name]) for name in output)


def test_denormalize_gives_back_the_pixels() -> None:
    for preprocess, channels in ((COLOR, 3), (GRAY, 1)):
        batch = make_batch(AugmentConfig(hflip=0), (4,), channels=channels)
        for dtype in (torch.float32, torch.float64):
            assert torch.equal(
                denormalize(EvalPreprocess(preprocess, dtype)(batch)["images"], preprocess), batch["images"]
            )
    stretched: Tensor = denormalize(torch.randn(2, 3, 4, 4), PreprocessConfig(per_image_standardization=True))
    assert (stretched.amin((1, 2, 3)).tolist(), stretched.amax((1, 2, 3)).tolist()) == ([0, 0], [255, 255])


def test_erased_pixels_are_the_mean_color_and_others_are_unchanged() -> None:
    augment = AugmentConfig(hflip=0, random_erasing=RandomErasingConfig(probability=1))
    preprocess = PreprocessConfig(size=SIZE, resize=None)
    boxes = erase_boxes(augment.random_erasing, 0, np.arange(6, dtype=np.int64), SIZE)
    images = torch.from_numpy(np.stack([noise(SIZE, SIZE, 3, n).transpose(2, 0, 1) for n in range(6)]))
    tensors = {
        "images": images,
        "targets": torch.zeros(6, dtype=torch.int64),
        "flips": torch.zeros(6, dtype=torch.bool),
    }
    batch = Batch({**tensors, "erase_boxes": torch.from_numpy(boxes)}, torch.arange(6), (6,))
    result = TrainPreprocess(preprocess, augment, 2, torch.float32)(batch, 0)["images"]
    expected = EvalPreprocess(preprocess, torch.float32)(batch)["images"]
    for row, (left, top, right, bottom) in enumerate(boxes.tolist()):
        assert (right - left) * (bottom - top) > 0
        expected[row, :, top:bottom, left:right] = 0
    assert torch.equal(result, expected)
