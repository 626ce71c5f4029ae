"""From images to predictions in batches: threads read images beside the network, and results come back in order.

Which decoder reads an image depends on the image and its position alone, so predictions do not depend on the number of
threads. Buffers are pinned where the device copies from them, and a buffer is filled again when its copy is complete.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from reconv.batch import Batch, CopyEvent
from reconv.data.dataset import U8
from reconv.detection.postprocess import Detections
from reconv.device import Device
from reconv.errors import DataError
from reconv.inference.backends.backend import InferenceBackend
from reconv.inference.gpu_reader import GpuImages, GpuReader
from reconv.inference.image_input import ImageInput
from reconv.inference.image_reader import EncodedImage, ImageInfo, ImageReader
from reconv.inference.output_predictions import OutputClasses, Selection, make_predictions, select_outputs
from reconv.inference.predictions import Prediction

_ROWS_PER_TASK = 8  # images that a thread reads in one task
_AHEAD = 4  # batches being read beside the network

Postprocess = Callable[[Any], Detections]
Outcome = ImageInfo | DataError  # of reading an image


@dataclass(frozen=True, slots=True)
class PredictStep:
    """From a batch of images on the device to predictions on the host."""

    backend: InferenceBackend
    device: Device
    classes: OutputClasses
    postprocess: Postprocess | None
    lock: Lock  # held while the network is in use

    def start(self, images: Tensor, selection: Selection) -> Callable[[], Any]:
        """Start the network; the returned call waits for what its predictions are made from."""
        with self.lock, torch.no_grad():
            selected = select_outputs(self.backend(images), self.classes.task, selection, self.postprocess)
            if isinstance(selected, Detections):
                return selected.cpu
            waits = [self.device.copy_to_host(tensor) for tensor in selected]
        return lambda: tuple(wait() for wait in waits)


@dataclass(slots=True)
class _ReadBatch:
    """A batch that is being read into a buffer."""

    pixels: Tensor  # uint8 [n, channels, size, size]
    items: Sequence[ImageInput]
    tasks: list[Future[list[Outcome | None]]]
    gpu_rows: Future[GpuImages] | None = None


@dataclass(slots=True)
class PredictPipeline:
    """Predicts lists of images; one list at a time."""

    step: PredictStep
    read: ImageReader
    threads: ThreadPoolExecutor
    batch_size: int
    gpu_reader: GpuReader | None = None
    _copies: dict[int, CopyEvent | None] = field(default_factory=dict)  # of each buffer, the last to the device

    def run(self, items: Sequence[ImageInput], selection: Selection) -> Iterator[tuple[Prediction | DataError, int]]:
        """The prediction of each image in order, or why it cannot be read, with its number."""
        starts = range(0, len(items), self.batch_size)
        ahead = min(_AHEAD, len(starts)) if self.step.device.kind == "cuda" else 1
        buffers = self._buffers(min(self.batch_size, len(items)), ahead)
        reading: deque[_ReadBatch] = deque()
        finishing: deque[tuple[Callable[[], Any], list[Outcome]]] = deque()
        number = 0
        try:
            for index in range(len(starts) + ahead):
                if index >= ahead:
                    finishing.append(self._compute(reading.popleft(), (index - ahead) % ahead, selection))
                if index < len(starts):
                    batch = items[starts[index] : starts[index] + self.batch_size]
                    reading.append(self._start_reading(batch, starts[index], buffers, index % ahead))
                while len(finishing) > 1 or (finishing and not reading):
                    for outcome in self._finish(*finishing.popleft(), selection):
                        yield outcome, number
                        number += 1
        finally:
            for batch_read in reading:
                self._abandon(batch_read)

    def _buffers(self, rows: int, number: int) -> list[Tensor]:
        is_pinned = self.step.device.kind == "cuda"
        return [torch.empty(rows, *self.read.shape, dtype=torch.uint8, pin_memory=is_pinned) for _ in range(number)]

    def _start_reading(
        self, items: Sequence[ImageInput], first: int, buffers: Sequence[Tensor], slot: int
    ) -> _ReadBatch:
        copied = self._copies.pop(slot, None)
        if copied is not None:
            copied.synchronize()
        pixels = buffers[slot][: len(items)]
        rows, on_gpu = pixels.numpy(), np.zeros(len(items), np.bool_)
        if self.gpu_reader is not None:
            on_gpu = self.gpu_reader.takes(np.arange(first, first + len(items)))
        tasks = [
            self.threads.submit(self._read_rows, items[at : at + _ROWS_PER_TASK], rows[at:], on_gpu[at:].tolist())
            for at in range(0, len(items), _ROWS_PER_TASK)
        ]
        gpu_rows = None
        if self.gpu_reader is not None and on_gpu.any():
            gpu_rows = self.gpu_reader.start(self.read, items, np.flatnonzero(on_gpu).tolist())
        return _ReadBatch(pixels, items, tasks, gpu_rows)

    def _read_rows(self, items: Sequence[ImageInput], rows: U8, skips: Sequence[bool]) -> list[Outcome | None]:
        """Read images into rows; None for those that the GPU decodes."""
        return [
            None if skip else self._read_row(item, row) for item, row, skip in zip(items, rows, skips, strict=False)
        ]

    def _read_row(self, item: ImageInput | EncodedImage, row: U8) -> Outcome:
        try:
            if isinstance(item, EncodedImage):
                return self.read.decode_into(item, row)
            return self.read.read_into(item, row)
        except DataError as error:
            row[:] = 0
            return error

    def _compute(self, batch: _ReadBatch, slot: int, selection: Selection) -> tuple[Callable[[], Any], list[Outcome]]:
        """Wait until a batch is read, and start the network on it."""
        outcomes = [outcome for task in batch.tasks for outcome in task.result()]
        decoded = None if batch.gpu_rows is None else batch.gpu_rows.result()
        found: list[Outcome] = []
        rows = batch.pixels.numpy()
        for row, outcome in enumerate(outcomes):
            if outcome is None and decoded is not None:
                outcome = decoded.infos.get(row)
            if outcome is None:  # the GPU has rejected it
                item = batch.items[row] if decoded is None else decoded.rejected.get(row, batch.items[row])
                outcome = self._read_row(item, rows[row])
            found.append(outcome)
        positions = torch.empty(len(found), dtype=torch.int64)
        sent, copied = self.step.device.send(Batch({"images": batch.pixels}, positions, (len(found),)))
        self._copies[slot] = copied
        images = sent["images"]
        if decoded is not None and decoded.crops is not None:
            assert self.gpu_reader is not None
            self.gpu_reader.place(decoded, images)
        return self.step.start(images, selection), found

    def _finish(
        self, wait: Callable[[], Any], outcomes: Sequence[Outcome], selection: Selection
    ) -> Iterator[Prediction | DataError]:
        empty = ImageInfo(None, None, 1, 1)
        infos = [outcome if isinstance(outcome, ImageInfo) else empty for outcome in outcomes]
        predictions = make_predictions(wait(), infos, self.step.classes, selection)
        for outcome, prediction in zip(outcomes, predictions, strict=True):
            yield outcome if isinstance(outcome, DataError) else prediction

    def _abandon(self, batch: _ReadBatch) -> None:
        """Wait for what is being read, since it writes to a buffer that is about to be freed."""
        for future in (*batch.tasks, *([batch.gpu_rows] if batch.gpu_rows is not None else [])):
            if not future.cancel():
                future.exception()
