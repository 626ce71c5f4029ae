"""Augmentation parameters are independent of each other, of workers and of the first step."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from reconv.core.batch import Batch
from reconv.data.dataset import NamedArrays
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.folder import FolderDataset
from reconv.data.transforms.normalize import EvalPreprocess
from reconv.data.transforms.train import HostTransforms, TrainPreprocess
from reconv.recipe.parts.batch import BatchConfig
from reconv.recipe.parts.data import (
    AugmentConfig,
    ColorJitterConfig,
    DataConfig,
    PreprocessConfig,
    RandomErasingConfig,
)
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe

SIZE = 20


def test_the_parameters_of_one_transform_do_not_depend_on_the_others() -> None:
    positions = np.arange(50, dtype=np.int64)

    def sample(**augment: object) -> NamedArrays:
        return HostTransforms(PreprocessConfig(), AugmentConfig(**augment)).sample(1, positions)  # type: ignore[arg-type]

    crop = sample()
    policy = sample(crop="none", auto_augment="autoaugment")
    color = sample(crop="none", color_jitter=ColorJitterConfig(hue=0.1))
    together = sample(color_jitter=ColorJitterConfig(hue=0.1), auto_augment="autoaugment")
    assert together.keys() == crop.keys() | policy.keys() | color.keys()
    for name, array in {**crop, **policy, **color}.items():
        assert np.array_equal(together[name], array), name


def make_recipe(augment: AugmentConfig, workers: int = 0) -> Recipe:
    preprocess = PreprocessConfig(size=SIZE, resize="auto-ratio")
    return Recipe(
        seed=2,
        data=DataConfig(preprocess=preprocess, drop_last=False, num_workers=workers),
        augment=augment,
        batch=BatchConfig(size=11, group="all"),
    )


def batches(tree: Path, augment: AugmentConfig, workers: int, start: int = 0) -> list[Batch]:
    dataset, recipe = FolderDataset(tree, "train"), make_recipe(augment, workers)
    plan = make_plan(recipe, Facts(len(dataset), 1, 3))
    prepare = TrainPreprocess(recipe.data.preprocess, augment, 3, torch.float32)
    steps = list(make_train_loader(dataset, recipe, plan, DataContext.on_host()).steps(start, 3))
    return [prepare(batch, start + number) for number, (batch,) in enumerate(steps)]


def test_color_policy_and_erasing_do_not_depend_on_workers_or_first_step(tree: Path) -> None:
    colorful = ColorJitterConfig(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    cases = (
        ("none", "autoaugment"),
        ("random", "autoaugment-v0"),
        ("random_resized", "randaugment"),
        ("random_resized", "none"),
    )
    for crop, policy in cases:
        augment = AugmentConfig(
            crop=crop,
            auto_augment=policy,
            color_jitter=colorful,
            random_erasing=RandomErasingConfig(probability=0.5),
        )  # type: ignore[arg-type]
        expected = batches(tree, augment, 0)
        plain = batches(tree, AugmentConfig(crop=crop), 0)  # type: ignore[arg-type]
        assert not torch.equal(expected[0]["images"], plain[0]["images"])
        for workers, start in ((3, 0), (2, 2)):
            found = batches(tree, augment, workers, start)
            assert len(found) == 3 - start
            for left, right in zip(found, expected[start:], strict=True):
                assert torch.equal(left["images"], right["images"])
                assert torch.equal(left["erase_boxes"], right["erase_boxes"])


def test_train_like_eval_gives_the_images_of_evaluation(tree: Path) -> None:
    dataset = FolderDataset(tree, "train")
    augment = AugmentConfig(train_like_eval=True)
    (first, *_) = batches(tree, augment, 0)
    (whole,) = list(EvalLoader(dataset, make_recipe(augment).data.preprocess, 11, DataContext.on_host()))
    seen = EvalPreprocess(make_recipe(augment).data.preprocess, torch.float32)(whole)["images"]
    assert torch.equal(first["images"], seen[first["indices"]])
    assert not torch.equal(first["images"], batches(tree, AugmentConfig(), 0)[0]["images"])
