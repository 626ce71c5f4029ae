"""Images and labels in memory are compared with the digests of the beginning, whenever the pipeline is made."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from reconv.data.checked_rows import WrongImages
from reconv.data.pipeline.samples import make_sample_pipeline
from reconv.data.readers.arrays import ArrayDataset
from reconv.recipe.parts.data import PreprocessConfig


def make_dataset() -> ArrayDataset:
    images = np.random.default_rng(0).integers(0, 256, (6, 1, 8, 8), np.uint8)
    return ArrayDataset("shapes", images, np.arange(6), tuple("abcdef"), "made here")


def read_all(dataset: ArrayDataset, size: int) -> tuple[list[int], bytes]:
    preprocess = PreprocessConfig(size=size, resize=size, channels=1, mean=(0,), std=(1,), divide_by=1)
    pipeline = make_sample_pipeline(dataset, preprocess, None)
    indices = np.arange(len(dataset))
    rows = {"images": np.zeros((6, 1, size, size), np.uint8), "targets": np.zeros(6, np.int64)}
    pipeline(indices, pipeline.params(0, indices), rows)
    return rows["targets"].tolist(), rows["images"].tobytes()


def flip_image(dataset: ArrayDataset) -> None:
    dataset.images[3, 0, 2, 5] ^= 16


def flip_label(dataset: ArrayDataset) -> None:
    dataset.targets[3] ^= 1


@pytest.mark.parametrize("size", [8, 4])
@pytest.mark.parametrize(("flip", "name"), [(flip_image, "shapes[3]"), (flip_label, "labels of shapes[3]")])
def test_what_changes_before_the_pipeline_is_made_is_found_and_repaired(
    size: int, flip: Callable[[ArrayDataset], None], name: str
) -> None:
    expected = read_all(make_dataset(), size)
    dataset, wrong = make_dataset(), WrongImages()
    dataset.check_images(wrong)
    flip(dataset)
    assert read_all(dataset, size) == expected
    assert wrong.take() == [name]
    assert read_all(dataset, size) == expected
    assert wrong.take() == []


def test_single_samples_are_compared_too() -> None:
    dataset, wrong = make_dataset(), WrongImages()
    expected = [(sample.data.tobytes(), sample.target) for sample in (dataset[n] for n in range(6))]
    dataset.check_images(wrong)
    flip_image(dataset)
    flip_label(dataset)
    assert [(sample.data.tobytes(), sample.target) for sample in (dataset[n] for n in range(6))] == expected
    assert wrong.take() == ["shapes[3]", "labels of shapes[3]"]
