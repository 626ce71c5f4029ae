"""Filling rows of a batch's buffer from a source: by gathering from memory, or by decoding one by one.

Owns the choice between the two and what a fetch is: it names the columns of a batch that it fills. Refuses to know
order, threads and devices. Invariant: both give the same bytes, each row depends on its index and draws alone, and a
target outside the classes is an error.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import I64, U8, Dataset, LabelError, Sample, sample_files
from reconv.data.decode.decode import any_picture, eval_picture, host_eval, shorter_side
from reconv.data.pipeline.native_samples import fill_from_files, is_for_files
from reconv.data.pipeline.stage_timing import spent
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.transforms.random_params import draw_host, is_recolouring, pad_crop
from reconv.data.transforms.train_sample import train_row
from reconv.recipe.data_fields import AugmentConfig, PreprocessConfig

_MAX_RESIDENT_BYTES = 256 * 2**20  # of an array resized once instead of in every epoch
_ROWS_PER_TASK = 4


Rows = Mapping[str, npt.NDArray[Any]]  # arrays by name, one row a sample
Draws = npt.NDArray[Any]  # one row a sample; what it holds is between a fetch and itself


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a batch: its name, and the shape and type of one row of it."""

    name: str
    shape: tuple[int, ...]
    dtype: npt.DTypeLike

    def empty(self, num_rows: int) -> npt.NDArray[Any]:
        """Rows yet to be filled."""
        return np.empty((num_rows, *self.shape), self.dtype)


class SamplePipeline(Protocol):
    """Fills rows for some indices and, in training, their draws; one of the columns is `images` [channels, s, s]."""

    @property
    def rows_per_task(self) -> int | None:
        """How many rows one worker takes at a time at least; None: all."""
        ...

    @property
    def columns(self) -> tuple[Column, ...]:
        """What is filled."""
        ...

    def draw(self, seed: int, positions: I64) -> Draws:
        """All that is random about the rows of these positions, for training."""
        ...

    def __call__(self, indices: I64, draws: Draws | None, rows: Rows) -> None:
        """Fill every column of all rows."""
        ...


MakeSamplePipeline = Callable[[Dataset, PreprocessConfig, AugmentConfig | None], SamplePipeline]


def make_sample_pipeline(
    source: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None
) -> SamplePipeline:
    """The fastest way to fill rows; `augment` is None for evaluation."""
    ready = ready_array(source, preprocess, augment)
    if ready is None or not isinstance(source, ArrayDataset):
        return Decode(source, preprocess, augment)
    return Gather(ready, source.targets, augment)


def classification_columns(channels: int, size: int) -> tuple[Column, ...]:
    """An image and its class."""
    return Column("images", (channels, size, size), np.uint8), Column("targets", (), np.int64)


def ready_array(source: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None) -> U8 | None:
    """All images [n, channels, size, size] before their crop; None where they do not lie in memory or must be resized
    each time."""
    if not isinstance(source, ArrayDataset):
        return None
    if augment is not None and (augment.crop == "random_resized" or is_recolouring(augment)):
        return None
    wanted = (preprocess.channels, preprocess.size, preprocess.size)
    if source.images.shape[1:] == wanted and shorter_side(preprocess) in (None, preprocess.size):
        return source.images
    size_bytes = len(source) * preprocess.channels * preprocess.size**2
    return _preprocessed(source, preprocess) if size_bytes <= _MAX_RESIDENT_BYTES else None


class Gather:
    """Rows of an array that already has the network's size."""

    rows_per_task: int | None = None

    def __init__(self, ready: U8, targets: I64, augment: AugmentConfig | None) -> None:
        self._ready = ready
        self._targets = targets
        self._augment = augment or AugmentConfig(crop="none")
        self._pad = self._augment.padding if self._augment.crop == "random" else 0
        self.columns = classification_columns(*ready.shape[1:3])

    def draw(self, seed: int, positions: I64) -> Draws:
        """Where the crops lie."""
        return draw_host(self._augment, seed, positions)

    def __call__(self, indices: I64, draws: Draws | None, rows: Rows) -> None:
        """Copy the rows, cropping them all at once."""
        rows["targets"][:] = self._targets[indices]
        if draws is None or self._pad == 0:
            np.take(self._ready, indices, axis=0, out=rows["images"])
        else:
            rows["images"][:] = pad_crop(self._ready[indices], draws, self._pad, self._augment.padding_mode)


class Decode:
    """Samples decoded (or taken as pixels) and cropped one by one."""

    rows_per_task: int | None = _ROWS_PER_TASK

    def __init__(self, source: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None) -> None:
        self._source = source
        self._preprocess = preprocess
        self._augment = augment
        self._is_by_file = augment is not None and is_for_files(preprocess, augment)
        self.columns = classification_columns(preprocess.channels, preprocess.size)

    def draw(self, seed: int, positions: I64) -> Draws:
        """Crops and colours."""
        return draw_host(self._augment or AugmentConfig(crop="none"), seed, positions)

    def __call__(self, indices: I64, draws: Draws | None, rows: Rows) -> None:
        """Decode each row into its place."""
        is_made = self._fill_from_files(indices, draws, rows)
        for row, index in enumerate(indices):
            if is_made is not None and is_made[row]:
                continue
            sample = labelled(self._source, int(index))
            self.fill(sample, None if draws is None else draws[row], rows["images"][row])
            rows["targets"][row] = sample.target

    def _fill_from_files(self, indices: I64, draws: Draws | None, rows: Rows) -> npt.NDArray[np.bool_] | None:
        """Fill what the compiled decoder makes of files; which rows those are, or None where it makes none."""
        if not self._is_by_file or self._augment is None or draws is None:
            return None
        files = sample_files(self._source, indices)
        if files is None:
            return None
        paths, targets = files
        rows["targets"][:] = targets
        return fill_from_files(paths, self._preprocess, self._augment, draws, rows["images"])

    def fill(self, sample: Sample, draws: Draws | None, out: U8) -> None:
        """Decode one sample into a row of images."""
        if self._augment is None or draws is None:
            image = any_picture(sample.data, self._preprocess.channels, sample.name)
            out[:] = eval_picture(image, self._preprocess)
        else:
            train_row(sample.data, self._preprocess, self._augment, draws, out, sample.name)


def labelled(source: Dataset, index: int) -> Sample:
    """A sample, read now; an error where its class is none of the source's."""
    began_s = time.perf_counter()
    sample = source[index]
    spent("disk", began_s)
    num_classes = len(source.class_names)
    if not 0 <= sample.target < num_classes:
        raise LabelError(
            f"label {sample.target} out of range",
            where=sample.name,
            why=f"there are {num_classes} classes, 0 to {num_classes - 1}",
            then="correct the label or remove the sample",
        )
    return sample


def _preprocessed(source: ArrayDataset, preprocess: PreprocessConfig) -> U8:
    ready = np.empty((len(source), preprocess.channels, preprocess.size, preprocess.size), np.uint8)
    for index, image in enumerate(source.images):
        ready[index] = host_eval(np.ascontiguousarray(image.transpose(1, 2, 0)), preprocess)
    return ready
