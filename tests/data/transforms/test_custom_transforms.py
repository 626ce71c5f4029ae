"""Your own transforms: their random numbers depend on the position alone, and what they return is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageFilter
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.custom_code import CustomCodeError, provide
from reconv.core.errors import UsageError
from reconv.data.pipeline.samples import make_sample_pipeline
from reconv.data.readers.digits import open_digits
from reconv.data.transforms.base import Rows
from reconv.data.transforms.custom import DeviceExtra
from reconv.data.transforms.train import TrainPreprocess
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

GRAY = PreprocessConfig(size=8, resize=None, channels=1, mean=(0.5,), std=(0.5,))


class Blur:
    def __init__(self, radius: float = 1.0) -> None:
        self.radius = radius

    def __call__(self, image: Image.Image, rng: np.random.Generator) -> Image.Image:
        return image.filter(ImageFilter.GaussianBlur(self.radius * rng.random()))


class Brighten:
    num_uniforms = 2

    def __call__(self, images: Tensor, uniforms: Tensor) -> Tensor:
        return images + uniforms.sum(dim=1).view(-1, 1, 1, 1)


def augment(transform: Any, *, on_device: bool = False, **options: Any) -> AugmentConfig:
    provide({"python:transform_l": transform})
    entry = {"name": "python:transform_l", "options": options, "on_device": on_device}
    return AugmentConfig(crop="none", hflip=0.0, extra=(entry,))


def rows(config: AugmentConfig, positions: Any, parts: int) -> Any:
    """Decoded images of the first digits at the positions, filled in several parts."""
    pipeline = make_sample_pipeline(open_digits("train"), GRAY, config)
    positions = np.asarray(positions)
    filled = {column.name: column.empty(len(positions)) for column in pipeline.columns}
    for part in np.array_split(np.arange(len(positions)), parts):
        params = pipeline.params(7, positions[part])
        own = {name: array[part[0] : part[-1] + 1] for name, array in filled.items()}
        pipeline(np.arange(len(positions))[part], params, own)
    return filled["images"]


def test_host_transforms_depend_on_the_position_and_not_on_how_rows_are_split() -> None:
    config = augment(Blur, radius=2.0)
    whole = rows(config, range(6), 1)
    assert np.array_equal(whole, rows(config, range(6), 3))
    assert not np.array_equal(whole, rows(config, range(6, 12), 1))
    assert not np.array_equal(whole, rows(augment(Blur, radius=0.1), range(6), 1))


def test_device_transforms_change_each_row_by_its_own_numbers() -> None:
    config, positions = augment(Brighten, on_device=True), np.arange(5)
    sampled = DeviceExtra(config).sample(Rows(3, positions, positions, positions * 0, 8))
    params = {name: torch.from_numpy(array) for name, array in sampled.items()}
    images = torch.zeros(5, 1, 8, 8, dtype=torch.uint8)
    preprocess = TrainPreprocess(GRAY, config, 10, torch.float32)

    def prepared(rows: slice) -> Tensor:
        tensors = {"images": images[rows], **{name: tensor[rows] for name, tensor in params.items()}}
        return preprocess(Batch(tensors, torch.from_numpy(positions[rows]), (len(positions[rows]),)), 0)["images"]

    [numbers] = params.values()
    whole = prepared(slice(None))
    assert torch.equal(whole[:, 0, 0, 0], -1 + numbers.sum(dim=1))
    assert torch.equal(whole, torch.cat([prepared(slice(0, 2)), prepared(slice(2, 5))]))
    assert len(set(numbers.flatten().tolist())) == 10


def smaller(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    return image.resize((4, 4))


def fails(image: Image.Image, rng: np.random.Generator) -> Image.Image:
    raise ValueError("broken")


@pytest.mark.parametrize(
    ("transform", "error", "message"),
    [
        (smaller, UsageError, r"an image of \(4, 4\), L"),
        (lambda image, rng: None, UsageError, "returns a NoneType"),
        (fails, CustomCodeError, "raised ValueError: broken"),
        (3, UsageError, "is not a transform"),
    ],
)
def test_a_host_transform_that_does_not_keep_the_image_is_refused(
    transform: Callable[..., Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        rows(augment(transform), range(2), 1)


def test_a_device_transform_that_changes_the_shape_is_refused() -> None:
    transform = DeviceExtra(augment(lambda images, uniforms: images.sum(), on_device=True))
    tensors = {"images": torch.zeros(2, 1, 4, 4), "extra_uniforms_0": torch.zeros(2, 1)}
    with pytest.raises(UsageError, match=r"torch.float32 \[\]"):
        transform.apply(Batch(tensors, torch.arange(2), (2,)))
