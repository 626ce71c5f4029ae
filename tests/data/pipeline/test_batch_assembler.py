"""Image sizes of training batches: their own, and growing with the step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from data_examples import noise
from loading_examples import host_train

from reconv.core.batch import Batch
from reconv.core.errors import RecipeError
from reconv.data.dataset import Dataset, select_rows
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.folder import FolderDataset
from reconv.data.transforms.host import train_preprocess
from reconv.data.transforms.train import HostTransforms
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import AugmentConfig, CutmixConfig, DataConfig, PreprocessConfig
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration

PREPROCESS = PreprocessConfig(size=24, resize=28)
GROWING = ((Duration(0, "ep"), 12), (Duration(50, "%"), 18), (Duration(3, "ep"), 24))


def make_recipe(crop: str = "random_resized", workers: int = 0, source: str = "auto", **augment: object) -> Recipe:
    return Recipe(
        seed=3,
        length=Duration(4, "ep"),
        data=DataConfig(source=source, preprocess=PREPROCESS, num_workers=workers),  # type: ignore[arg-type]
        augment=AugmentConfig(crop=crop, padding=2, cutmix=CutmixConfig(alpha=1.0), **augment),  # type: ignore[arg-type]
        batch=BatchConfig(size=4, group=2, micro=2),
    )


def plan_of(recipe: Recipe, num_train: int = 11) -> Plan:
    return make_plan(recipe, Facts(num_train, 5, 3))


def images_of(dataset: Dataset, recipe: Recipe, start: int, stop: int) -> list[tuple[Batch, ...]]:
    plan = plan_of(recipe, len(dataset))
    return [tuple(step) for step in make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(start, stop)]


def test_the_plan_has_the_image_size_of_each_step() -> None:
    plan = plan_of(make_recipe(progressive_resizing=GROWING))
    assert plan.total_steps == 8
    assert plan.sizes == ((0, 12), (4, 18), (6, 24))
    assert [plan.size_at(step) for step in range(8)] == [12, 12, 12, 12, 18, 18, 24, 24]
    assert "image size: 12 px, 18 px from step 4, 24 px from step 6 in training, 24 px in evaluation" in plan.lines
    assert "image size: 16 px in training, 24 px in evaluation" in plan_of(make_recipe(size=16)).lines
    assert plan_of(make_recipe()).sizes == ((0, 24),)
    late = ((Duration(2, "ep"), 32), (Duration(8, "step"), 40))
    assert plan_of(make_recipe(size=16, progressive_resizing=late)).sizes == ((0, 16), (4, 32))


def test_progressive_sizes_out_of_order_are_an_error() -> None:
    with pytest.raises(RecipeError, match=r"progressive_resizing must increase, but 3step is step 3, before step 4"):
        plan_of(make_recipe(progressive_resizing=((Duration(2, "ep"), 12), (Duration(3, "step"), 18))))


@pytest.mark.parametrize("crop", ["none", "random", "random_resized"])
def test_batches_have_the_size_of_their_step_with_any_workers_and_first_step(tree: Path, crop: str) -> None:
    dataset = FolderDataset(tree, "train")
    expected = images_of(dataset, make_recipe(crop, progressive_resizing=GROWING), 0, 8)
    assert [step[0]["images"].shape[-1] for step in expected] == [12, 12, 12, 12, 18, 18, 24, 24]
    for workers, start in ((1, 0), (2, 0), (8, 0), (2, 3), (0, 5)):
        found = images_of(dataset, make_recipe(crop, workers, progressive_resizing=GROWING), start, 8)
        for left, right in zip(found, expected[start:], strict=True):
            for one, other in zip(left, right, strict=True):
                assert one.tensors.keys() == other.tensors.keys()
                assert all(torch.equal(one[name], other[name]) for name in one.tensors)


@pytest.mark.parametrize("policy", ["none", "randaugment"])
@pytest.mark.parametrize("crop", ["none", "random", "random_resized"])
def test_images_of_another_size_are_those_of_the_host_transform(crop: str, policy: str) -> None:
    pixels = np.stack([noise(30, 30, 3, number).transpose(2, 0, 1) for number in range(8)])
    dataset = ArrayDataset("made", pixels, np.arange(8) % 3, ("a", "b", "c"), "made")
    recipe = make_recipe(crop, progressive_resizing=GROWING, auto_augment=policy)
    for step, size in ((1, 12), (2, 18), (3, 18)):
        plan = make_plan(recipe.model_copy(update={"length": Duration(2, "ep")}), Facts(8, 5, 3))
        assert plan.size_at(step) == size
        loader = make_train_loader(dataset, recipe, plan, DataContext.on_host())
        (micro_batches,) = list(loader.steps(step, step + 1))
        for batch in micro_batches:
            params = HostTransforms(PREPROCESS, recipe.augment).sample(recipe.seed, batch.positions.numpy())
            for row, index in enumerate(batch["indices"].tolist()):
                spec = train_preprocess(PREPROCESS, recipe.augment, size)
                wanted = host_train(
                    pixels[index].transpose(1, 2, 0).copy(), spec, recipe.augment, select_rows(params, row)
                )
                assert np.array_equal(batch["images"][row].numpy(), wanted)


def test_cutmix_boxes_fit_the_size_of_the_step(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    steps = images_of(dataset, make_recipe(progressive_resizing=GROWING), 0, 8)
    for step in steps:
        for batch in step:
            assert int(batch["cutmix_boxes"].max()) <= batch["images"].shape[-1]


def test_repeated_batches_follow_the_sizes() -> None:
    recipe = make_recipe(source="synthetic-device", progressive_resizing=GROWING)
    dataset = open_dataset("synthetic-device", None, "train", recipe.data.model_copy(update={"num_samples": 11}))
    plan = plan_of(recipe, len(dataset))
    steps = list(make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(2, 8))
    assert [step[0]["images"].shape[-1] for step in steps] == [12, 12, 18, 18, 24, 24]
    assert steps[0][0]["images"] is steps[1][0]["images"]
    assert int(steps[5][0].positions[0]) == 7 * 4


def test_evaluation_keeps_the_size_of_preprocessing(tree: Path) -> None:
    recipe = make_recipe(size=12, progressive_resizing=GROWING)
    (batch,) = list(EvalLoader(FolderDataset(tree, "val"), recipe.data.preprocess, 8, DataContext.on_host()))
    assert batch["images"].shape == (5, 3, 24, 24)
