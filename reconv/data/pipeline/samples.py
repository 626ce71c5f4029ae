"""From dataset indices to filled rows of a batch: the protocol, and the pipelines of classification.

Every row depends on its index and its augmentation parameters alone; how many rows a worker fills at once changes
nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.data.checked_rows import CheckedRows
from reconv.data.dataset import (
    I64,
    U8,
    Dataset,
    FileBacked,
    LabelError,
    NamedArrays,
    Sample,
    is_multilabel,
    sample_files,
    select_rows,
)
from reconv.data.decode.pillow import to_image
from reconv.data.pipeline.row_reader import RowReader, Source, can_crop_natively, has_jpeg_files
from reconv.data.readers.arrays import ArrayDataset
from reconv.data.stage_timing import record_stage
from reconv.data.transforms.geometry import CROP_CORNER, crop_params, pad_crop
from reconv.data.transforms.host import CenterView, eval_transform, resized_shorter_side, train_view
from reconv.data.transforms.train import HostTransforms, changes_images_on_host
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

MAX_PREPROCESSED_BYTES = 256 * 2**20  # of images that are preprocessed once instead of in every epoch
_MIN_ROWS_PER_TASK = 4
_ROWS_PER_CALL = 64  # where the compiled decoder has threads of its own: Python's part of a call is shared by more rows


@dataclass(frozen=True, slots=True)
class Column:
    """One array of a batch: its name, and the shape and dtype of a row; `to_device`: whether it leaves the host."""

    name: str
    shape: tuple[int, ...]
    dtype: npt.DTypeLike
    to_device: bool = True

    def empty(self, num_rows: int) -> npt.NDArray[Any]:
        return np.empty((num_rows, *self.shape), self.dtype)


class SamplePipeline(Protocol):
    """Reads, decodes and transforms samples into rows; the column `images` is uint8 [channels, size, size]."""

    @property
    def min_rows_per_task(self) -> int | None:
        """The fewest rows worth a task of their own; None: fill all rows in one task."""
        ...

    @property
    def columns(self) -> tuple[Column, ...]: ...
    def params(self, seed: int, positions: I64) -> NamedArrays:
        """The augmentation parameters of the rows at these positions."""
        ...

    def __call__(self, indices: I64, params: NamedArrays, rows: NamedArrays) -> None:
        """Fill every column of all rows."""
        ...


MakeSamplePipeline = Callable[[Dataset, PreprocessConfig, AugmentConfig | None, int], SamplePipeline]


def make_sample_pipeline(
    dataset: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None, decode_threads: int = 1
) -> SamplePipeline:
    """The fastest pipeline for a dataset; `augment` is None for evaluation.

    `decode_threads`: threads of the compiled decoder that all tasks share; 1: a task decodes in its own.
    """
    images = preprocessed_images(dataset, preprocess, augment)
    if images is None or not isinstance(dataset, ArrayDataset):
        return DecodePipeline(dataset, preprocess, augment, decode_threads)
    checked = dataset.checked_images
    if checked is not None and images is not dataset.images:
        checked = CheckedRows(images, dataset.kind, checked.wrong)
    return ArrayPipeline(images, dataset.targets, augment, checked, dataset.checked_targets)


def classification_columns(channels: int, size: int, num_labels: int | None = None) -> tuple[Column, ...]:
    """`num_labels`: the number of classes of multi-label data, whose targets are multi-hot."""
    targets = Column("targets", (), np.int64) if num_labels is None else Column("targets", (num_labels,), np.float32)
    return Column("images", (channels, size, size), np.uint8), targets


def preprocessed_images(dataset: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None) -> U8 | None:
    """All images [n, channels, size, size] before their crop; None if they are not in memory, or the result of
    resizing depends on augmentation parameters."""
    if not isinstance(dataset, ArrayDataset):
        return None
    if augment is not None and (augment.crop == "random_resized" or changes_images_on_host(augment)):
        return None
    shape = (preprocess.channels, preprocess.size, preprocess.size)
    if dataset.images.shape[1:] == shape and resized_shorter_side(preprocess) in (None, preprocess.size):
        return dataset.images
    if len(dataset) * int(np.prod(shape)) > MAX_PREPROCESSED_BYTES:
        return None
    if dataset.checked_images is not None:  # since they were read, they may have changed
        dataset.checked_images.take(np.arange(len(dataset)))
    images = np.empty((len(dataset), *shape), np.uint8)
    for index, image in enumerate(dataset.images):
        pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
        images[index] = eval_transform(to_image(pixels, preprocess.channels), preprocess)
    return images


class ArrayPipeline:
    """Gathers rows of an array [n, channels, size, size] that already has the network's size."""

    min_rows_per_task: int | None = None

    def __init__(
        self,
        images: U8,
        targets: I64,
        augment: AugmentConfig | None,
        checked_images: CheckedRows | None = None,
        checked_targets: CheckedRows | None = None,
    ) -> None:
        """The rows that are checked are those of `images` and `targets`."""
        self._images = images
        self._targets = targets
        self._checked_images = checked_images
        self._checked_targets = checked_targets
        self._augment = augment or AugmentConfig(crop="none")
        self._pad = self._augment.padding if self._augment.crop == "random" else 0
        self.columns = classification_columns(*images.shape[1:3])

    def params(self, seed: int, positions: I64) -> NamedArrays:
        return crop_params(self._augment, seed, positions)

    def __call__(self, indices: I64, params: NamedArrays, rows: NamedArrays) -> None:
        targets = self._checked_targets
        rows["targets"][:] = self._targets[indices] if targets is None else targets.take(indices)
        if self._pad == 0 and self._checked_images is None:
            np.take(self._images, indices, axis=0, out=rows["images"])
        else:
            checked = self._checked_images
            images = self._images[indices] if checked is None else checked.take(indices)
            corners = params[CROP_CORNER] if self._pad else None
            rows["images"][:] = (
                images if corners is None else pad_crop(images, corners, self._pad, self._augment.padding_mode)
            )


@dataclass(frozen=True, slots=True)
class _DatasetRows:
    """The samples of rows; reading one also fills its target."""

    dataset: Dataset
    files: FileBacked | None  # the dataset, if its samples are files on a disk
    indices: I64
    targets: npt.NDArray[Any]

    def paths(self) -> Sequence[bytes] | None:
        files = None if self.files is None else self.files.files(self.indices)
        if files is None:
            return None
        paths, self.targets[:] = files
        return paths

    def read(self, row: int) -> Source:
        sample = read_sample(self.dataset, int(self.indices[row]))
        sample.fill_target(self.targets[row, ...])
        return Source(sample.data, sample.name)


class DecodePipeline:
    """Decodes (or takes as pixels) and transforms samples; `augment` is None for evaluation."""

    def __init__(
        self,
        dataset: Dataset,
        preprocess: PreprocessConfig,
        augment: AugmentConfig | None,
        decode_threads: int = 1,
    ) -> None:
        self._dataset = dataset
        first, self._files = np.zeros(min(1, len(dataset)), np.int64), None
        if isinstance(dataset, FileBacked) and sample_files(dataset, first) is not None:
            self._files = dataset
        self._transforms = None if augment is None else HostTransforms(preprocess, augment)
        self._decode_threads = decode_threads
        self._reader = (
            RowReader(CenterView(preprocess), is_native=False)
            if augment is None
            else RowReader(train_view(preprocess, augment), can_crop_natively(preprocess, augment))
        )
        fills_from_files = augment is not None and can_fill_from_files(preprocess, augment)
        is_threaded = fills_from_files and decode_threads > 1 and has_jpeg_files(dataset)
        self.min_rows_per_task: int | None = _ROWS_PER_CALL if is_threaded else _MIN_ROWS_PER_TASK
        num_labels = len(dataset.class_names) if is_multilabel(dataset) else None
        self.columns = classification_columns(preprocess.channels, preprocess.size, num_labels)

    def params(self, seed: int, positions: I64) -> NamedArrays:
        return {} if self._transforms is None else self._transforms.sample(seed, positions)

    def __call__(self, indices: I64, params: NamedArrays, rows: NamedArrays) -> None:
        sources, images = _DatasetRows(self._dataset, self._files, indices, rows["targets"]), rows["images"]
        for outcome in self._reader.fill(sources, params, images, self._decode_threads):
            if isinstance(outcome, DataError):
                raise outcome
        if self._transforms is not None and not self._transforms.is_identity:
            for row, pixels in enumerate(images):
                self._transforms.apply(pixels, select_rows(params, row))


def can_fill_from_files(preprocess: PreprocessConfig, augment: AugmentConfig) -> bool:
    """True if the compiled decoder does all there is to do for a training image."""
    return can_crop_natively(preprocess, augment) and not changes_images_on_host(augment)


def read_sample(dataset: Dataset, index: int) -> Sample:
    """A sample whose read is timed; an error if its target is not a class of the dataset."""
    began_s = time.perf_counter()
    sample = dataset[index]
    record_stage("disk", began_s)
    num_classes = len(dataset.class_names)
    if sample.labels is None and not 0 <= sample.target < num_classes:
        raise LabelError(
            f"label {sample.target} out of range",
            where=sample.name,
            why=f"there are {num_classes} classes, 0 to {num_classes - 1}",
            hint="correct the label or remove the sample",
        )
    return sample
