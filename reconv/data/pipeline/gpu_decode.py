"""JPEG decoding on a GPU beside the host's workers: a fraction of the rows stays encoded, in a buffer of its own, and
the GPU decodes, crops and resizes it.

Which rows those are is a function of position, fraction and the file's own bytes, never of time, workers or ranks. A
file that the GPU's decoder rejects is decoded, or reported, by the host.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.core.errors import DataError
from reconv.data.dataset import I64, U8, Dataset, LabelError, NamedArrays, select_rows
from reconv.data.decode.jpeg_header import read_header
from reconv.data.decode.pillow import MAX_PIXELS
from reconv.data.pipeline.prefetcher import PendingBatch
from reconv.data.pipeline.sample_pipeline import Column, DecodePipeline, read_sample
from reconv.data.transforms.geometry import random_resized_crop_box
from reconv.data.transforms.host_transforms import eval_crop_box
from reconv.kernels.ops.crop import CropBox
from reconv.recipe.parts.data import AugmentConfig, PreprocessConfig

ON_GPU = "on_gpu"  # parameter, bool [n]: whether the GPU shall decode the row

# Columns that stay on the host.
ENCODED = "encoded"  # uint8 [n, capacity]: the files
ENCODED_BYTES = "encoded_bytes"  # int64 [n]: the length of the file; 0: the host has filled the row
CROP_BOX = "crop_box"  # float64 [n, 4]: left, top, right, bottom of what is resized


def is_on_gpu(positions: I64, fraction: float) -> npt.NDArray[np.bool_]:
    """Whether the GPU decodes each position: evenly spaced, so that all batches have the same number of them."""
    before = np.floor(positions * fraction)
    on_gpu: npt.NDArray[np.bool_] = np.floor((positions + 1) * fraction) > before
    return on_gpu


@dataclass(frozen=True, slots=True)
class GpuResize:
    """How the GPU resizes boxes, as in `kernels.crop`."""

    antialias: bool
    is_cut: bool  # False: the filter reads around the box, as if the whole image had been resized (evaluation)


class GpuDecodePipeline:
    """A `DecodePipeline` that leaves a fraction of the rows encoded; `augment` is None for evaluation.

    The host decodes what is not a plain JPEG file in color, or does not fit in the space of an image.
    """

    def __init__(
        self, dataset: Dataset, preprocess: PreprocessConfig, augment: AugmentConfig | None, fraction: float
    ) -> None:
        self._dataset = dataset
        self._preprocess = preprocess
        self._augment = augment
        self._fraction = fraction
        self._host = DecodePipeline(dataset, preprocess, augment)
        self._capacity = preprocess.channels * preprocess.size**2
        self.resize = GpuResize(True, False) if augment is None else GpuResize(augment.antialias, True)
        self.min_rows_per_task = self._host.min_rows_per_task
        self.columns = (
            *self._host.columns,
            Column(ENCODED, (self._capacity,), np.uint8, to_device=False),
            Column(ENCODED_BYTES, (), np.int64, to_device=False),
            Column(CROP_BOX, (4,), np.float64, to_device=False),
        )

    def params(self, seed: int, positions: I64) -> NamedArrays:
        return {**self._host.params(seed, positions), ON_GPU: is_on_gpu(positions, self._fraction)}

    def __call__(self, indices: I64, params: NamedArrays, rows: NamedArrays) -> None:
        rows[ENCODED_BYTES][:] = 0
        for row, index in enumerate(indices.tolist()):
            sample, own = read_sample(self._dataset, index), select_rows(params, row)
            sample.fill_target(rows["targets"][row, ...])
            box = self._crop_box(sample.data, own) if own[ON_GPU] else None
            if box is None:
                self._host.transform(sample, own, rows["images"][row])
            else:
                num_bytes = len(sample.data)
                rows[ENCODED][row, :num_bytes] = np.frombuffer(sample.data, np.uint8)
                rows[ENCODED_BYTES][row], rows[CROP_BOX][row] = num_bytes, box

    def _crop_box(self, data: bytes | U8, params: NamedArrays) -> CropBox | None:
        """The box of the image that the row shows; None: the host must decode the file."""
        if not isinstance(data, bytes) or len(data) > self._capacity:
            return None
        header = read_header(data)
        if header is None or header.num_components != 3 or header.width * header.height > MAX_PIXELS:
            return None
        if self._augment is None:
            return eval_crop_box(header.width, header.height, self._preprocess)
        return random_resized_crop_box(header.width, header.height, params, self._augment)


def encoded_files(rows: NamedArrays, numbers: I64) -> tuple[list[Tensor], list[CropBox]]:
    """The files and crop boxes of some rows."""
    lengths, boxes = rows[ENCODED_BYTES][numbers].tolist(), rows[CROP_BOX][numbers].tolist()
    files = [
        torch.from_numpy(rows[ENCODED][row, :length]) for row, length in zip(numbers.tolist(), lengths, strict=True)
    ]
    return files, [(left, top, right, bottom) for left, top, right, bottom in boxes]


class JpegDecoderDevice(Protocol):
    """A device that decodes JPEG files."""

    def crops(
        self, files: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool, is_cut: bool
    ) -> tuple[Tensor, Sequence[int]]:
        """Finished crops [n, 3, size, size] of the files that decode, and the numbers of these files."""
        ...

    def write_crops(self, images: Tensor, rows: Tensor, crops: Tensor, indices: Tensor) -> None:
        """Put crops of these numbers into rows of a batch on the device, ordered with what is computed there."""
        ...


@dataclass(frozen=True, slots=True)
class GpuRows:
    """Rows of a batch that the GPU has decoded."""

    rows: I64  # sorted
    crops: Tensor | None  # None: there are none
    seconds: float


class GpuDecoder:
    """Decodes the encoded rows of batches, one batch after the other, in a thread of its own."""

    def __init__(self, device: JpegDecoderDevice) -> None:
        self._device = device
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="reconv-gpu-decode")

    def start(self, pending: PendingBatch, resize: GpuResize) -> None:
        """Decode a batch's rows as soon as the host's workers are done with it."""
        pending.gpu_rows = self._thread.submit(self._decode, pending, resize)

    def wait(self, pending: PendingBatch) -> None:
        """Wait until the GPU is done with a batch; rows it rejected are filled by the host from here on."""
        assert pending.gpu_rows is not None
        decoded = pending.gpu_rows.result()
        pending.stage_times.add({"decode": decoded.seconds})
        for row in np.setdiff1d(np.flatnonzero(pending.rows[ENCODED_BYTES]), decoded.rows).tolist():
            decode_on_host(pending, row)
            pending.refill_on_wait(row)

    def place(self, pending: PendingBatch, images: Tensor, first: int) -> None:
        """Put the decoded rows from `first` on into the images of a micro-batch on the device."""
        assert pending.gpu_rows is not None
        decoded = pending.gpu_rows.result()
        rows = pending.current_rows(decoded.rows)
        is_here = (rows >= first) & (rows < first + len(images))
        is_here[is_here] = pending.rows[ENCODED_BYTES][rows[is_here]] > 0  # else the host has filled it since
        if decoded.crops is not None and is_here.any():
            numbers = torch.from_numpy(np.flatnonzero(is_here))
            self._device.write_crops(images, torch.from_numpy(rows[is_here] - first), decoded.crops, numbers)

    def close(self) -> None:
        """Cancel what has not begun and wait for the rest."""
        self._thread.shutdown(wait=True, cancel_futures=True)

    def _decode(self, pending: PendingBatch, resize: GpuResize) -> GpuRows:
        is_good = np.ones(len(pending.indices), np.bool_)
        for task, outcome in pending.outcomes():
            if isinstance(outcome, DataError):
                # The other rows of a failed task stay the GPU's: how rows are cut into tasks depends on the workers.
                for row in range(*task.indices(len(pending.indices))):
                    is_good[row] = not isinstance(outcome, LabelError) and pending.fill(row) is None
        began_s = time.perf_counter()
        rows = np.flatnonzero(is_good & (pending.rows[ENCODED_BYTES] > 0))
        if not len(rows):
            return GpuRows(rows, None, 0.0)
        files, boxes = encoded_files(pending.rows, rows)
        size = pending.rows["images"].shape[-1]
        crops, decoded = self._device.crops(files, boxes, size, antialias=resize.antialias, is_cut=resize.is_cut)
        return GpuRows(rows[list(decoded)], crops, time.perf_counter() - began_s)


def decode_on_host(pending: PendingBatch, row: int) -> None:
    """Have the host decode a row from now on."""
    if ON_GPU in pending.params:
        pending.params[ON_GPU][row] = False
