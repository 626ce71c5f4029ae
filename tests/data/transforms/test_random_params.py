"""Color jitter, random erasing and training images made as evaluation's."""

from __future__ import annotations

import colorsys
from pathlib import Path

import numpy as np
import torch
from data_examples import noise
from PIL import Image, ImageEnhance
from torch import Tensor

from reconv.batch import Batch
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import make_train_loader
from reconv.data.readers.folder import FolderDataset
from reconv.data.transforms.color import color_jitter, color_params, shift_hue
from reconv.data.transforms.device_transforms import EvalPreprocess, TrainPreprocess
from reconv.data.transforms.geometry import erase_boxes
from reconv.data.transforms.params import host_params
from reconv.recipe.data_fields import (
    AugmentConfig,
    ColorJitterConfig,
    DataConfig,
    PreprocessConfig,
    RandomErasingConfig,
)
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import BatchConfig, Recipe

SIZE = 20


def stay(tensor: Tensor) -> Tensor:
    return tensor


def test_color_jitter_is_pillows_enhancements_in_order() -> None:
    image = Image.fromarray(noise(12, 12, 3, 0))
    params = {"brightness": np.array(0.8), "contrast": np.array(1.5), "saturation": np.array(0.8)}
    wanted = ImageEnhance.Brightness(image).enhance(0.8)
    wanted = ImageEnhance.Contrast(wanted).enhance(1.5)
    wanted = ImageEnhance.Color(wanted).enhance(0.8)
    assert np.array_equal(np.asarray(color_jitter(image, params)), np.asarray(wanted))
    hue = color_jitter(image, {"hue": np.array(0.25)})
    assert np.array_equal(np.asarray(hue), np.asarray(shift_hue(image, 0.25)))


def test_color_factors_cover_their_ranges_and_only_those_asked_for() -> None:
    config = ColorJitterConfig(brightness=0.2, contrast=2.0, hue=0.1)
    params = color_params(AugmentConfig(color_jitter=config), 0, np.arange(4000, dtype=np.int64))
    ranges = {"brightness": (0.8, 1.2), "contrast": (0.0, 3.0), "hue": (-0.1, 0.1)}
    assert params.keys() == ranges.keys()
    for name, (low, high) in ranges.items():
        assert low <= params[name].min() < low + 0.01 * (high - low)
        assert high - 0.01 * (high - low) < params[name].max() <= high


def test_hue_turns_round_the_circle() -> None:
    for colour in ((200, 40, 40), (10, 220, 90), (60, 60, 180)):
        image = Image.new("RGB", (2, 2), colour)
        for turn in (0.0, 0.25, -0.25, 0.5):
            hue, saturation, value = colorsys.rgb_to_hsv(*(c / 255 for c in colour))
            wanted = np.array(colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)) * 255
            assert np.abs(np.asarray(shift_hue(image, turn))[0, 0] - wanted).max() < 8


def test_the_parameters_of_one_transform_do_not_depend_on_the_others() -> None:
    positions = np.arange(50, dtype=np.int64)
    crop = host_params(AugmentConfig(), 1, positions)
    policy = host_params(AugmentConfig(crop="none", auto_augment="autoaugment"), 1, positions)
    color = host_params(AugmentConfig(crop="none", color_jitter=ColorJitterConfig(hue=0.1)), 1, positions)
    together = host_params(
        AugmentConfig(color_jitter=ColorJitterConfig(hue=0.1), auto_augment="autoaugment"), 1, positions
    )
    assert together.keys() == crop.keys() | policy.keys() | color.keys()
    for name, array in (crop | policy | color).items():
        assert np.array_equal(together[name], array), name


def test_erased_boxes_have_the_probability_areas_and_ratios_asked_for() -> None:
    erase = RandomErasingConfig(probability=0.4, scale=(0.05, 0.2), ratio=(0.5, 2.0))
    boxes = erase_boxes(erase, 0, np.arange(4000, dtype=np.int64), 1000)
    widths, heights = boxes[:, 2] - boxes[:, 0], boxes[:, 3] - boxes[:, 1]
    erased = widths * heights > 0
    assert abs(erased.mean() - 0.4) < 0.03
    areas, ratios = (widths * heights)[erased] / 1e6, widths[erased] / heights[erased]
    assert 0.0495 < areas.min() < 0.06 < 0.19 < areas.max() < 0.2005
    assert 0.49 < ratios.min() < 0.55 < 1.8 < ratios.max() < 2.02
    assert boxes.min() >= 0
    assert boxes.max() <= 1000
    assert np.array_equal(erase_boxes(erase, 0, np.array([17], np.int64), 1000)[0], boxes[17])
    assert not erase_boxes(
        RandomErasingConfig(probability=1, scale=(1.0, 1.0), ratio=(1.0, 1.0)), 0, np.arange(5), 10
    ).any()


def test_erased_pixels_are_the_mean_colour_and_the_rest_is_untouched() -> None:
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


def make_recipe(augment: AugmentConfig, workers: int = 0) -> Recipe:
    preprocess = PreprocessConfig(size=SIZE, resize="auto-ratio")
    return Recipe(
        seed=2,
        data=DataConfig(preprocess=preprocess, drop_last=False, num_workers=workers),
        augment=augment,
        batch=BatchConfig(size=11, group="all"),
    )


def batches(tree: Path, augment: AugmentConfig, workers: int, start: int = 0) -> list[Batch]:
    source, recipe = FolderDataset(tree, "train"), make_recipe(augment, workers)
    plan = make_plan(recipe, Facts(len(source), 1, 3))
    prepare = TrainPreprocess(recipe.data.preprocess, augment, 3, torch.float32)
    steps = list(make_train_loader(source, recipe, plan, DataContext.on_host()).steps(start, 3))
    return [prepare(batch, start + number) for number, (batch,) in enumerate(steps)]


def test_colours_policies_and_erasing_do_not_depend_on_workers_or_first_step(tree: Path) -> None:
    colourful = ColorJitterConfig(brightness=0.4, contrast=0.4, saturation=0.4, hue=0.1)
    changed = 0
    for crop in ("none", "random", "random_resized"):
        for policy in ("none", "autoaugment", "autoaugment-v0", "randaugment"):
            augment = AugmentConfig(
                crop=crop,
                auto_augment=policy,
                color_jitter=colourful,
                random_erasing=RandomErasingConfig(probability=0.5),
            )  # type: ignore[arg-type]
            expected = batches(tree, augment, 0)
            plain = batches(tree, AugmentConfig(crop=crop), 0)  # type: ignore[arg-type]
            changed += not torch.equal(expected[0]["images"], plain[0]["images"])
            for workers, start in ((1, 0), (2, 0), (8, 0), (2, 2)):
                found = batches(tree, augment, workers, start)
                assert len(found) == 3 - start
                for left, right in zip(found, expected[start:], strict=True):
                    assert torch.equal(left["images"], right["images"])
                    assert torch.equal(left["erase_boxes"], right["erase_boxes"])
    assert changed == 12


def test_train_like_eval_shows_training_what_evaluation_shows(tree: Path) -> None:
    source = FolderDataset(tree, "train")
    augment = AugmentConfig(train_like_eval=True)
    (first, *_) = batches(tree, augment, 0)
    (whole,) = list(EvalLoader(source, make_recipe(augment).data.preprocess, 11, DataContext.on_host()))
    seen = EvalPreprocess(make_recipe(augment).data.preprocess, torch.float32)(whole)["images"]
    assert torch.equal(first["images"], seen[first["indices"]])
    assert not torch.equal(first["images"], batches(tree, AugmentConfig(), 0)[0]["images"])
