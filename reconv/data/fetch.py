"""Filling rows of a batch's buffer from a source: by gathering from memory, or by decoding one by one.

Owns the choice between the two. Refuses to know order, threads and devices. Invariant: both give the same bytes, each
row depends on its index and draws alone, and a target outside the classes is an error.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from reconv.data.augment import F64, is_recolouring, pad_crop
from reconv.data.decode import decode_picture, eval_picture, host_eval, picture, shorter_side, train_picture
from reconv.data.source import I64, U8, Source
from reconv.data.sources.arrays import ArraySource
from reconv.errors import DataError
from reconv.recipe.images import Augment, Preprocess

_MAX_RESIDENT_BYTES = 256 * 2**20  # of an array resized once instead of in every epoch
_ROWS_PER_TASK = 4


class LabelError(DataError):
    """A label that is no class: the list is wrong, which no missing image excuses."""


class Fetch(Protocol):
    """Fills images [n, channels, size, size] and targets [n] for some indices and, in training, their draws."""

    rows_per_task: int | None  # how many rows one worker takes at a time; None: all

    def __call__(self, indices: I64, draws: F64 | None, images: U8, targets: I64) -> None: ...


def make_fetch(source: Source, preprocess: Preprocess, augment: Augment | None) -> Fetch:
    """The fastest way to fill rows; `augment` is None for evaluation."""
    ready = ready_array(source, preprocess, augment)
    if ready is None or not isinstance(source, ArraySource):
        return Decode(source, preprocess, augment)
    return Gather(ready, source.targets, augment)


def ready_array(source: Source, preprocess: Preprocess, augment: Augment | None) -> U8 | None:
    """All images [n, channels, size, size] before their crop; None where they do not lie in memory or must be resized
    each time."""
    if not isinstance(source, ArraySource):
        return None
    if augment is not None and (augment.crop == "resized" or is_recolouring(augment)):
        return None
    wanted = (preprocess.channels, preprocess.size, preprocess.size)
    if source.images.shape[1:] == wanted and shorter_side(preprocess) in (None, preprocess.size):
        return source.images
    size_bytes = len(source) * preprocess.channels * preprocess.size**2
    return _preprocessed(source, preprocess) if size_bytes <= _MAX_RESIDENT_BYTES else None


class Gather:
    """Rows of an array that already has the network's size."""

    rows_per_task: int | None = None

    def __init__(self, ready: U8, targets: I64, augment: Augment | None) -> None:
        self._ready = ready
        self._targets = targets
        self._pad = augment.pad if augment is not None and augment.crop == "pad" else 0
        self._pad_form = "black" if augment is None else augment.pad_form

    def __call__(self, indices: I64, draws: F64 | None, images: U8, targets: I64) -> None:
        """Copy the rows, cropping them all at once."""
        targets[:] = self._targets[indices]
        if draws is None or self._pad == 0:
            np.take(self._ready, indices, axis=0, out=images)
        else:
            images[:] = pad_crop(self._ready[indices], draws, self._pad, self._pad_form)


class Decode:
    """Samples decoded (or taken as pixels) and cropped one by one."""

    rows_per_task: int | None = _ROWS_PER_TASK

    def __init__(self, source: Source, preprocess: Preprocess, augment: Augment | None) -> None:
        self._source = source
        self._preprocess = preprocess
        self._augment = augment

    def __call__(self, indices: I64, draws: F64 | None, images: U8, targets: I64) -> None:
        """Decode each row into its place."""
        num_classes = len(self._source.class_names)
        channels = self._preprocess.channels
        for row, index in enumerate(indices):
            sample = self._source.sample(int(index))
            if not 0 <= sample.target < num_classes:
                raise LabelError(
                    f"label {sample.target} out of range",
                    where=sample.name,
                    why=f"there are {num_classes} classes, 0 to {num_classes - 1}",
                    then="correct the label or remove the sample",
                )
            if isinstance(sample.data, bytes):
                image = decode_picture(sample.data, channels, sample.name)
            else:
                image = picture(sample.data, channels)
            if self._augment is None or draws is None:
                images[row] = eval_picture(image, self._preprocess)
            else:
                images[row] = train_picture(image, self._preprocess, self._augment, draws[row])
            targets[row] = sample.target


def _preprocessed(source: ArraySource, preprocess: Preprocess) -> U8:
    ready = np.empty((len(source), preprocess.channels, preprocess.size, preprocess.size), np.uint8)
    for index, image in enumerate(source.images):
        ready[index] = host_eval(np.ascontiguousarray(image.transpose(1, 2, 0)), preprocess)
    return ready
