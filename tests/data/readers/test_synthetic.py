"""Generated images."""

from __future__ import annotations

import numpy as np

from reconv.data.dataset import Sample
from reconv.data.readers.dataset_factory import open_dataset
from reconv.data.readers.synthetic import SyntheticDataset
from reconv.recipe.parts.data import DataConfig, PreprocessConfig


def pixels(sample: Sample) -> np.ndarray:
    assert isinstance(sample.data, np.ndarray)
    return sample.data


def test_synthetic_images_depend_on_their_index_and_show_their_class() -> None:
    train, val = (SyntheticDataset(split, 40, 4, 16, 3) for split in ("train", "val"))  # type: ignore[arg-type]
    assert np.array_equal(pixels(train[7]), pixels(train[7]))
    assert not np.array_equal(pixels(train[7]), pixels(train[11]))
    assert not np.array_equal(pixels(train[7]), pixels(val[7]))
    assert (train[7].target, train[8].target) == (3, 0)
    means = np.stack([np.mean([pixels(train[i]) for i in range(c, 40, 4)], axis=0) for c in range(4)])
    right = [int(np.argmin([np.abs(pixels(val[i]) - mean).mean() for mean in means])) == i % 4 for i in range(40)]
    assert all(right)


def test_synthetic_is_shaped_by_the_recipe() -> None:
    data = DataConfig(
        num_samples=20, num_classes=3, preprocess=PreprocessConfig(size=12, channels=1, mean=(0.5,), std=(0.5,))
    )
    for kind in ("synthetic", "synthetic-device"):
        source = open_dataset(kind, None, "train", data)
        assert (source.kind, len(source), len(source.class_names)) == (kind, 20, 3)
        assert pixels(source[0]).shape == (12, 12, 1)
        assert len(open_dataset(kind, None, "val", data)) == 4
