"""The digits in the package."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from reconv.data.dataset import Sample
from reconv.data.readers.digits import open_digits


def pixels(sample: Sample) -> np.ndarray:
    assert isinstance(sample.data, np.ndarray)
    return sample.data


def test_digits_are_those_of_scikit_learn_with_every_fifth_for_validation() -> None:
    bunch = load_digits()
    train, val = open_digits("train"), open_digits("val")
    assert (len(train), len(val)) == (1437, 360)
    is_val = np.arange(1797) % 5 == 0
    for source, chosen in ((train, ~is_val), (val, is_val)):
        assert np.array_equal(source.images[:, 0], np.rint(bunch.images[chosen] * 255 / 16).astype(np.uint8))
        assert np.array_equal(source.targets, bunch.target[chosen])
    assert train.images.max() == 255
    assert pixels(val[1]).shape == (8, 8, 1)
    assert val[1].name == "digits[1]"
