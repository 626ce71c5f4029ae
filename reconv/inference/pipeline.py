"""From images to predictions in batches: threads read images beside the network, and results come back in order.

Which decoder reads an image depends on the image, its position and the batch size, so predictions do not depend on the
number of threads. Buffers are pinned where the device copies from them, and filled again when that copy is complete.

An image that cannot be read changes no other's bits (tests/inference/test_pipeline.py).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from reconv.core.batch import Batch, CopyEvent
from reconv.core.errors import DataError
from reconv.detection.postprocess import Detections
from reconv.device import Device
from reconv.inference.backends.base import InferenceBackend
from reconv.inference.image_input import ImageInput
from reconv.inference.image_reader import ImageInfo, ImageReader
from reconv.inference.outputs import OutputClasses, Selection, make_predictions, select_outputs
from reconv.inference.predictions import Prediction

_ROWS_PER_TASK = 16  # most images that a thread reads in one task
_ROWS_PER_CALL = 64  # the same where the threads of the compiled decoder decode them: fewer waits for the GIL
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
            selected = select_outputs(self.backend(images), self.classes, selection, self.postprocess)
            if isinstance(selected, Detections):
                return selected.cpu
            waits = [self.device.copy_to_host(tensor) for tensor in selected]
        return lambda: tuple(wait() for wait in waits)


class PixelBuffers:
    """Buffers of pixels that are kept from one list of images to the next: pinning memory is slow."""

    def __init__(self, is_pinned: bool) -> None:
        self._is_pinned = is_pinned
        self._idle: list[Tensor] = []
        self._lock = Lock()

    def take(self, shape: tuple[int, ...]) -> Tensor:
        """A uint8 buffer of this shape."""
        with self._lock:
            for index, buffer in enumerate(self._idle):
                if tuple(buffer.shape) == shape:
                    return self._idle.pop(index)
        return torch.empty(shape, dtype=torch.uint8, pin_memory=self._is_pinned)

    def give_back(self, buffers: Sequence[Tensor]) -> None:
        """Keep buffers that are no longer read or written."""
        with self._lock:
            self._idle = [*buffers, *self._idle][: _AHEAD + 1]


@dataclass(slots=True)
class _ReadBatch:
    """A batch that is being read into a buffer."""

    pixels: Tensor  # uint8 [n, channels, size, size]
    tasks: list[Future[list[Outcome]]]

    def abandon(self) -> None:
        """Wait for what is being read: it writes to a buffer."""
        for future in self.tasks:
            if not future.cancel():
                future.exception()


@dataclass(frozen=True, slots=True)
class _Started:
    """A batch that the network computes."""

    wait: Callable[[], Any] | None  # None: no image could be read
    outcomes: list[Outcome]


@dataclass(frozen=True, slots=True)
class PredictPipeline:
    """Predicts lists of images; may be used by several threads."""

    step: PredictStep
    read: ImageReader
    threads: ThreadPoolExecutor
    num_threads: int
    buffers: PixelBuffers

    def run(
        self, items: Sequence[ImageInput], selection: Selection, batch_size: int
    ) -> Iterator[Prediction | DataError]:
        """The prediction of each image in order, or why it cannot be read."""
        starts = range(0, len(items), batch_size)
        # On a CPU the network has all cores: what reads beside it would only delay its threads.
        ahead = min(_AHEAD, len(starts)) if self.step.device.kind == "cuda" else 0
        shape = (min(batch_size, len(items)), *self.read.shape)
        slots = [self.buffers.take(shape) for _ in range(min(ahead + 1, len(starts)))]
        copies: dict[int, CopyEvent | None] = {}
        reading: deque[_ReadBatch] = deque()
        computing: deque[_Started] = deque()
        try:
            for index in range(len(starts) + ahead):
                if index < len(starts):
                    slot = index % len(slots)
                    if (copied := copies.pop(slot, None)) is not None:
                        copied.synchronize()
                    batch = items[starts[index] : starts[index] + batch_size]
                    reading.append(self._start_reading(batch, slots[slot][: len(batch)]))
                if index >= ahead:
                    started, copied = self._compute(reading.popleft(), selection)
                    computing.append(started)
                    copies[(index - ahead) % len(slots)] = copied
                while len(computing) > 1 or (computing and not reading):
                    yield from self._finish(computing.popleft(), selection)
        finally:
            for unfinished in reading:
                unfinished.abandon()
            for copied in copies.values():
                if copied is not None:
                    copied.synchronize()
            self.buffers.give_back(slots)

    def _start_reading(self, items: Sequence[ImageInput], pixels: Tensor) -> _ReadBatch:
        tasks, rows = [], pixels.numpy()
        step, decode_threads = max(1, min(_ROWS_PER_TASK, -(-len(items) // self.num_threads))), 1
        if self.read.decoder == "native" and len(items) >= 2 * _ROWS_PER_CALL:
            step, decode_threads = _ROWS_PER_CALL, self.num_threads
        for start in range(0, len(items), step):
            task = slice(start, min(start + step, len(items)))
            tasks.append(self.threads.submit(self.read.read_group, items[task], rows[task], decode_threads))
        return _ReadBatch(pixels, tasks)

    def _images(self, batch: _ReadBatch) -> tuple[Tensor, list[Outcome], CopyEvent | None]:
        """A batch on the device when it has been read, and what became of each image."""
        outcomes = [outcome for task in batch.tasks for outcome in task.result()]
        # positions are not used
        sent, copied = self.step.device.send(Batch({"images": batch.pixels}, torch.zeros(1), (len(outcomes),)))
        if copied is not None:
            copied.wait()
        return sent["images"], outcomes, copied

    def _compute(self, batch: _ReadBatch, selection: Selection) -> tuple[_Started, CopyEvent | None]:
        """Wait until a batch is read, and start the network on it."""
        images, outcomes, copied = self._images(batch)
        good = [row for row, outcome in enumerate(outcomes) if isinstance(outcome, ImageInfo)]
        if len(good) < len(outcomes):  # the others get the bits of a batch without them
            images = images[torch.tensor(good, dtype=torch.int64)]
        return _Started(self.step.start(images, selection) if good else None, outcomes), copied

    def _finish(self, started: _Started, selection: Selection) -> Iterator[Prediction | DataError]:
        infos = [outcome for outcome in started.outcomes if isinstance(outcome, ImageInfo)]
        if started.wait is None:
            yield from (outcome for outcome in started.outcomes if isinstance(outcome, DataError))
            return
        predictions = make_predictions(started.wait(), infos, self.step.classes, selection)
        for outcome in started.outcomes:
            yield outcome if isinstance(outcome, DataError) else next(predictions)
