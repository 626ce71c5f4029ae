"""Rows made by a device's JPEG engine, ahead of time and beside the host's.

Owns the thread that waits for handed rows and gives them to the engine. Refuses to know which device that is and which
rows are handed over. Invariant: a file that the engine does not take is made, and judged, by the host; every row is the
same whatever else was in its batch, its task or its call.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from reconv.data.dataset import I64, LabelError
from reconv.data.pipeline.gpu_decode import HANDED, HandoverLayout, keep_here
from reconv.data.pipeline.prefetcher import Pending
from reconv.errors import DataError
from reconv.kernels.crop.ops import CropBox


class JpegDecoderDevice(Protocol):
    """What decodes JPEG files on a device."""

    def crops(
        self, files: Sequence[Tensor], boxes: Sequence[CropBox], size: int, *, antialias: bool, is_cut: bool
    ) -> tuple[Tensor, Sequence[int]]:
        """The boxes of the files' images [n, 3, size, size], once they are there, and which files those are."""
        ...

    def place(self, images: Tensor, rows: Tensor, crops: Tensor, numbers: Tensor) -> None:
        """Put crops of these numbers into rows of a batch on the device, in order with what is computed there."""
        ...


@dataclass(frozen=True, slots=True)
class DeviceRows:
    """Rows of a batch that the engine has made."""

    rows: I64  # in order
    crops: Tensor | None  # None: there are none
    seconds: float


class GpuDecoder:
    """Gives handed rows of batches, one batch after the other, to an engine."""

    def __init__(self, engine: JpegDecoderDevice) -> None:
        self._engine = engine
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="reconv-engine")

    def start(self, pending: Pending, form: HandoverLayout) -> None:
        """Begin to make the rows as soon as the host's part of them is done."""
        pending.device_rows = self._pool.submit(self._make, pending, form)

    def settle(self, pending: Pending) -> None:
        """Wait until the engine is done with a batch; what it did not take is the host's from here on."""
        assert pending.device_rows is not None
        made = pending.device_rows.result()
        pending.stages.add({"decode": made.seconds})
        for row in np.setdiff1d(np.flatnonzero(pending.rows[HANDED][:, 0]), made.rows).tolist():
            assert pending.draws is not None
            keep_here(pending.draws, row)
            pending.fill_again(row)

    def place(self, pending: Pending, images: Tensor, first: int) -> None:
        """Put the rows from `first` on into a micro-batch that lies on the device."""
        assert pending.device_rows is not None
        made = pending.device_rows.result()
        rows = pending.places_of(made.rows)
        is_wanted = (rows >= first) & (rows < first + len(images))
        is_wanted[is_wanted] = pending.rows[HANDED][rows[is_wanted], 0] > 0  # else the host has made it since
        if made.crops is not None and is_wanted.any():
            numbers = torch.from_numpy(np.flatnonzero(is_wanted))
            self._engine.place(images, torch.from_numpy(rows[is_wanted] - first), made.crops, numbers)

    def close(self) -> None:
        """Forget what was not begun and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)

    def _make(self, pending: Pending, form: HandoverLayout) -> DeviceRows:
        is_good = np.ones(len(pending.indices), np.bool_)
        for task, outcome in pending.outcomes():
            if isinstance(outcome, DataError):
                # What shares a task with a bad file is the engine's as ever: tasks depend on the number of workers.
                for row in range(*task.indices(len(pending.indices))):
                    is_good[row] = not isinstance(outcome, LabelError) and pending.fill(row) is None
        began_s = time.perf_counter()
        rows = np.flatnonzero(is_good & (pending.rows[HANDED][:, 0] > 0))
        if not len(rows):
            return DeviceRows(rows, None, 0.0)
        images, handed = pending.rows["images"], pending.rows[HANDED][rows].tolist()
        files = [
            torch.from_numpy(images[row].reshape(-1)[: int(num_bytes)])
            for row, (num_bytes, *_) in zip(rows.tolist(), handed, strict=True)
        ]
        boxes: list[CropBox] = [(left, top, right, bottom) for _, left, top, right, bottom in handed]
        size = images.shape[-1]
        crops, taken = self._engine.crops(files, boxes, size, antialias=form.antialias, is_cut=form.is_cut)
        return DeviceRows(rows[list(taken)], crops, time.perf_counter() - began_s)
