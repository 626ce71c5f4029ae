"""Small helpers of tests that load and transform samples."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np

from reconv.core.errors import DataError
from reconv.data.dataset import NamedArrays, select_rows
from reconv.data.decode.pillow import to_image
from reconv.data.pipeline.row_reader import RowReader, Source, can_crop_natively
from reconv.data.transforms.host import eval_transform, train_view
from reconv.data.transforms.train import HostTransforms
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig


def each_row(params: NamedArrays) -> Iterator[NamedArrays]:
    """The parameters of one sample after the other."""
    for row in range(len(next(iter(params.values())))):
        yield select_rows(params, row)


class _One(NamedTuple):
    data: bytes | np.ndarray

    def paths(self) -> None:
        return None

    def read(self, row: int) -> Source:
        return Source(self.data, "")


def host_train(
    data: bytes | np.ndarray, preprocess: PreprocessConfig, augment: AugmentConfig, params: NamedArrays
) -> np.ndarray:
    """A training image in an array of its own."""
    out = np.empty((preprocess.channels, preprocess.size, preprocess.size), np.uint8)
    reader = RowReader(train_view(preprocess, augment), can_crop_natively(preprocess, augment))
    [outcome] = reader.fill(_One(data), {name: row[None] for name, row in params.items()}, out[None])
    if isinstance(outcome, DataError):
        raise outcome
    HostTransforms(preprocess, augment).apply(out, params)
    return out


def host_eval(data: bytes | np.ndarray, preprocess: PreprocessConfig) -> np.ndarray:
    """An evaluation image."""
    return eval_transform(to_image(data, preprocess.channels), preprocess)
