"""Preloaded images: the bytes of the streamed loader, from any step on."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import RecipeError
from reconv.data.dataset import Dataset
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.recipe.loader import load
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, DataConfig, MixupConfig, PreprocessConfig, RandomErasingConfig
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration

NUM_IMAGES = 50


def stay(tensor: Tensor) -> Tensor:
    return tensor


@pytest.fixture
def dataset() -> ArrayDataset:
    pixels = np.random.default_rng(4).integers(0, 256, (NUM_IMAGES, 3, 8, 8), dtype=np.uint8)
    return ArrayDataset("cifar10", pixels, np.arange(NUM_IMAGES) % 10, tuple("abcdefghij"), "noise")


def recipe_of(preload: str, augment: AugmentConfig, size: int = 8, drop_last: bool = False) -> Recipe:
    preprocess = PreprocessConfig(size=size, resize=None)
    return Recipe(
        seed=11,
        data=DataConfig(preprocess=preprocess, drop_last=drop_last, preload=preload, num_workers=0),  # type: ignore[arg-type]
        augment=augment,
        batch=BatchConfig(size=12, group=3, micro=6),
    )


def batches(dataset: Dataset, recipe: Recipe, start: int = 0, stop: int = 9) -> Iterator[Batch]:
    plan = make_plan(recipe, Facts(len(dataset), 1, len(dataset.class_names)))
    for micro_batches in make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(start, stop):
        yield from micro_batches


@pytest.mark.parametrize("form", ["constant", "reflect"])
@pytest.mark.parametrize("crop", ["random", "none"])
@pytest.mark.parametrize("size", [8, 6])
def test_batches_cropped_on_the_device_equal_those_of_the_host(
    dataset: ArrayDataset, form: str, crop: str, size: int
) -> None:
    augment = AugmentConfig(
        crop=crop,  # type: ignore[arg-type]
        padding=3,
        padding_mode=form,  # type: ignore[arg-type]
        hflip_mode="alternating",
        mixup=MixupConfig(alpha=0.3),
        random_erasing=RandomErasingConfig(probability=0.5),
    )
    host = list(batches(dataset, recipe_of("off", augment, size)))
    device = list(batches(dataset, recipe_of("device", augment, size)))
    assert len(host) == len(device) == 18
    for a, b in zip(host, device, strict=True):
        assert a.tensors.keys() == b.tensors.keys()
        assert a.groups == b.groups and torch.equal(a.positions, b.positions)
        assert [name for name in a.tensors if not torch.equal(a[name], b[name])] == []
    assert device[0]["images"].shape == (6, 3, size, size)
    assert device[0]["images"].dtype == torch.uint8


def test_preloaded_batches_can_start_at_any_step(dataset: ArrayDataset) -> None:
    recipe = recipe_of("device", AugmentConfig(crop="random", padding=2, hflip_mode="alternating"))
    whole, late = list(batches(dataset, recipe)), list(batches(dataset, recipe, start=5))
    assert len(late) == 8
    assert all(torch.equal(a["images"], b["images"]) for a, b in zip(whole[10:], late, strict=True))


def test_padding_wider_than_the_image_is_black(dataset: ArrayDataset) -> None:
    augment = AugmentConfig(crop="random", padding=20)
    host, device = (next(batches(dataset, recipe_of(where, augment)))["images"] for where in ("off", "device"))
    assert torch.equal(host, device)
    assert (device.flatten(1).amax(1) == 0).any()


def test_alternating_flips_show_every_image_flipped_and_unflipped_in_two_epochs(dataset: ArrayDataset) -> None:
    augment = AugmentConfig(crop="none", hflip_mode="alternating")
    plan_steps = 4 * NUM_IMAGES // 12  # the stream is wrapped: 4 epochs are not a whole number of steps
    seen: dict[int, list[bool]] = {}
    for batch in batches(dataset, recipe_of("off", augment), stop=plan_steps):
        for index, flip in zip(batch["indices"].tolist(), batch["flips"].tolist(), strict=True):
            seen.setdefault(index, []).append(flip)
    assert len(seen) == NUM_IMAGES
    assert all(a != b for flips in seen.values() for a, b in pairwise(flips))
    first = [flips[0] for flips in seen.values()]
    assert 0.25 < sum(first) / len(first) < 0.75


def test_images_that_are_resized_each_time_cannot_be_preloaded(dataset: ArrayDataset) -> None:
    with pytest.raises(RecipeError, match="cannot stay on the device"):
        next(batches(dataset, recipe_of("device", AugmentConfig(crop="random_resized"))))
    synthetic = open_dataset(
        "synthetic", None, "train", DataConfig(num_samples=24, preprocess=PreprocessConfig(size=8))
    )
    with pytest.raises(RecipeError, match=r"data\.preload=off"):
        next(batches(synthetic, recipe_of("device", AugmentConfig(crop="random"))))


def test_reflect_padding_as_wide_as_the_image_is_an_error() -> None:
    with pytest.raises(RecipeError, match="must be smaller than the image"):
        load("quickstart", [("augment.padding", "8", "--set"), ("augment.padding_mode", "reflect", "--set")])
    assert load("quickstart", [("augment.padding", "7", "--set"), ("augment.padding_mode", "reflect", "--set")])


def test_preloaded_images_change_size_at_the_same_steps(dataset: ArrayDataset) -> None:
    sizes = ((Duration(0, "step"), 6), (Duration(5, "step"), 7), (Duration(20, "step"), 8))
    augment = AugmentConfig(crop="random", padding=2, progressive_resizing=sizes)
    host, device = (list(batches(dataset, recipe_of(where, augment), stop=24)) for where in ("off", "device"))
    assert [batch["images"].shape[-1] for batch in device[::2]] == [6] * 5 + [7] * 15 + [8] * 4
    assert all(torch.equal(a["images"], b["images"]) for a, b in zip(host, device, strict=True))
