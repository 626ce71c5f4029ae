"""Small helpers of tests that load and transform samples."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from reconv.data.dataset import NamedArrays, select_rows
from reconv.data.decode.pillow import to_image
from reconv.data.transforms.host import eval_transform, train_transform
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig


def each_row(params: NamedArrays) -> Iterator[NamedArrays]:
    """The parameters of one sample after the other."""
    for row in range(len(next(iter(params.values())))):
        yield select_rows(params, row)


def host_train(
    data: bytes | np.ndarray, preprocess: PreprocessConfig, augment: AugmentConfig, params: NamedArrays
) -> np.ndarray:
    """A training image in an array of its own."""
    out = np.empty((preprocess.channels, preprocess.size, preprocess.size), np.uint8)
    train_transform(data, preprocess, augment, params, out)
    return out


def host_eval(data: bytes | np.ndarray, preprocess: PreprocessConfig) -> np.ndarray:
    """An evaluation image."""
    return eval_transform(to_image(data, preprocess.channels), preprocess)
