"""Decoded batches that are kept in host memory and sent to the device again and again."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import suppress

import numpy as np
import torch

from reconv.core.batch import Batch
from reconv.data.dataset import U8
from reconv.data.pipeline.buffers import Buffer, HostToDevice, buffer_layout, private_buffer, whole_pages
from reconv.data.pipeline.samples import Column


class KeptBatches:
    """Copies of batches, by number, in one block of memory.

    The block is pinned when its batches are first sent again, so that each is one asynchronous copy from then on. It
    is on the host, not on the device: the copies overlap with the forward passes, and device memory is what limits
    the batch size of training.
    """

    def __init__(self, numbers: Sequence[int], batch_size: int, to_device: HostToDevice) -> None:
        self._to_device = to_device
        self._batch_size = batch_size
        self._slots = {number: slot for slot, number in enumerate(numbers)}
        self._batches: dict[int, Batch] = {}
        self._buffer: Buffer | None = None
        self._memory: U8 | None = None
        self._is_pinned = False

    @property
    def is_complete(self) -> bool:
        return bool(self._slots) and len(self._batches) == len(self._slots)

    def add(self, number: int, batch: Batch) -> None:
        """Keep a copy of a batch on the host."""
        arrays = {name: tensor.numpy() for name, tensor in batch.tensors.items()}
        columns = [Column(name, array.shape[1:], array.dtype) for name, array in arrays.items()]
        slot_bytes = buffer_layout(columns, self._batch_size)[1]
        memory = self._memory if self._memory is not None else self._allocate(slot_bytes)
        slot = memory[slot_bytes * self._slots[number] :][:slot_bytes]
        views = {field.name: field.view(slot) for field in buffer_layout(columns, len(batch))[0]}
        for name, view in views.items():
            np.copyto(view, arrays[name])
        tensors = {name: torch.from_numpy(view) for name, view in views.items()}
        self._batches[number] = Batch(tensors, batch.positions.clone(), batch.groups)

    def send(self) -> Iterator[tuple[int, Batch]]:
        """All batches on the device, with their numbers."""
        self._pin()
        for number, kept in sorted(self._batches.items()):
            batch, copy = self._to_device.send(kept)
            if copy is None:
                batch = batch.map(torch.clone)  # it may be the kept one, which metrics must not change
            else:
                copy.wait()
            yield number, batch

    def _allocate(self, slot_bytes: int) -> U8:
        self._buffer = private_buffer(whole_pages(slot_bytes * len(self._slots)))
        # The base of every view, below which is a memoryview that numpy does not look through: the buffer is
        # released, and unpinned, with the last of them.
        self._memory = np.frombuffer(memoryview(self._buffer.memory), np.uint8)
        weakref.finalize(self._memory, self._buffer.release).atexit = False
        return self._memory

    def _pin(self) -> None:
        if self._buffer is not None and not self._is_pinned:
            self._is_pinned = True
            with suppress(RuntimeError):  # of a system that allows less pinned memory: copies then take longer
                self._buffer.unpin = self._to_device.pin(torch.from_numpy(self._memory))
