"""Host memory of batches: a pool of reused buffers, and the transfer to the device.

A buffer is reused only when no array or tensor of its last batch is alive and copies from it have finished, so the
number of buffers is bounded by how many batches are held at once.

On the CPU the batch is that buffer, without a copy (tests/data/pipeline/test_buffers.py).
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.core.batch import Batch, CopyEvent
from reconv.data.dataset import U8, NamedArrays
from reconv.data.pipeline.samples import Column

_ALIGN_BYTES = 64  # a cache line


class HostToDevice(Protocol):
    """Transfer of tensors to the device."""

    def move(self, tensor: Tensor) -> Tensor:
        """The tensor on the device; the copy is finished, or ordered before what is computed next there."""
        ...

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Pin host memory, if the device has faster copies from pinned memory; the result undoes it."""
        ...

    def send(self, batch: Batch) -> tuple[Batch, CopyEvent | None]:
        """The batch on the device and its copy, which what is computed there must wait for; None: it is finished."""
        ...


@dataclass(frozen=True, slots=True)
class BlockingTransfer:
    """Moves tensor by tensor and waits for each copy."""

    move: Callable[[Tensor], Tensor]

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return _nothing

    def send(self, batch: Batch) -> tuple[Batch, CopyEvent | None]:
        return batch.map(self.move), None


@dataclass(frozen=True, slots=True)
class CastImages:
    """A transfer that converts images to another dtype on the host first, which is exact."""

    to_device: HostToDevice
    dtype: torch.dtype

    def move(self, tensor: Tensor) -> Tensor:
        return self.to_device.move(tensor)

    def pin(self, memory: Tensor) -> Callable[[], None]:
        return _nothing  # the converted images lie elsewhere

    def send(self, batch: Batch) -> tuple[Batch, CopyEvent | None]:
        return self.to_device.send(batch.replace(images=batch["images"].to(self.dtype)))


def with_transfer_dtype(to_device: HostToDevice, dtype: str) -> HostToDevice:
    """A transfer that sends images as `dtype` (they are uint8 on the host)."""
    return to_device if dtype == "uint8" else CastImages(to_device, getattr(torch, dtype))


def _nothing() -> None:
    """There is nothing to undo."""


@dataclass(frozen=True, slots=True)
class BufferField:
    """Layout of a column's rows in a buffer."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str

    def view(self, memory: U8) -> npt.NDArray[Any]:
        num_bytes = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        return memory[self.start : self.start + num_bytes].view(self.dtype).reshape(self.shape)


def buffer_layout(columns: Sequence[Column], num_rows: int) -> tuple[tuple[BufferField, ...], int]:
    """The fields of the columns for `num_rows` rows, and their total size in bytes."""
    fields, start = [], 0
    for column in columns:
        dtype, shape = np.dtype(column.dtype), (num_rows, *column.shape)
        fields.append(BufferField(column.name, start, shape, dtype.str))
        start += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    return tuple(fields), max(start, _ALIGN_BYTES)


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory for the rows of one batch; `file` is a descriptor by which other processes map it."""

    memory: mmap.mmap
    file: int | None
    unpin: Callable[[], None] = _nothing
    is_released: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def release(self) -> None:
        """Give the memory up: it is never filled again."""
        self.unpin()
        self.is_released = True
        if self.file is not None:
            os.close(self.file)


@dataclass(frozen=True, slots=True)
class BufferView:
    """A buffer in use: its rows by name, and where they are."""

    buffer: Buffer
    rows: NamedArrays
    fields: tuple[BufferField, ...]


def private_buffer(num_bytes: int) -> Buffer:
    """Memory of this process alone."""
    return Buffer(mmap.mmap(-1, num_bytes), None)


class BufferPool:
    """The buffers of one stream of batches."""

    def __init__(self, to_device: HostToDevice, allocate: Callable[[int], Buffer], limit: int) -> None:
        self._to_device = to_device
        self._allocate = allocate
        self._limit = limit  # beyond it a copy in flight is waited for rather than allocating another buffer
        self._free: deque[Buffer] = deque()
        self._in_flight: deque[tuple[NamedArrays, CopyEvent]] = deque()
        self._num_buffers = 0
        self._is_closed = False

    @property
    def num_buffers(self) -> int:
        """Number of buffers, free ones included."""
        return self._num_buffers

    def acquire(self, columns: Sequence[Column], num_rows: int, max_rows: int) -> BufferView:
        """A buffer for `num_rows` rows, large enough for `max_rows`."""
        self._collect_finished_copies()
        num_bytes = buffer_layout(columns, max_rows)[1]
        buffer = self._take_free(num_bytes) or self._allocate_pinned(num_bytes)
        fields = buffer_layout(columns, num_rows)[0]
        # This array is the base of every view, so it lives as long as any of them: below it is a memoryview, which
        # numpy does not look through.
        whole = np.frombuffer(memoryview(buffer.memory), np.uint8)
        weakref.finalize(whole, self._give_back, buffer).atexit = False
        return BufferView(buffer, {field.name: field.view(whole) for field in fields}, fields)

    def hold_until_copied(self, rows: NamedArrays, copy: CopyEvent | None) -> None:
        """Keep the rows alive until a copy from them has finished."""
        if copy is not None:
            self._in_flight.append((rows, copy))

    def close(self) -> None:
        """Wait for copies in flight; buffers still in use are released with their last view."""
        while self._in_flight:
            self._in_flight.popleft()[1].synchronize()
        self._is_closed = True
        while self._free:
            self._release(self._free.popleft())

    def _give_back(self, buffer: Buffer) -> None:
        """The last view of the buffer is gone; called by whichever thread dropped it."""
        if self._is_closed:
            self._release(buffer)
        else:
            self._free.append(buffer)

    def _collect_finished_copies(self) -> None:
        while self._in_flight and self._in_flight[0][1].query():
            self._in_flight.popleft()
        if self._in_flight and not self._free and self._num_buffers >= self._limit:
            self._in_flight.popleft()[1].synchronize()

    def _take_free(self, num_bytes: int) -> Buffer | None:
        while self._free:
            buffer = self._free.popleft()
            if buffer.num_bytes == whole_pages(num_bytes):
                return buffer
            self._release(buffer)  # the size of images has changed
        return None

    def _allocate_pinned(self, num_bytes: int) -> Buffer:
        buffer = self._allocate(whole_pages(num_bytes))
        buffer.unpin = self._to_device.pin(torch.frombuffer(buffer.memory, dtype=torch.uint8))
        self._num_buffers += 1
        return buffer

    def _release(self, buffer: Buffer) -> None:
        buffer.release()
        self._num_buffers -= 1


def whole_pages(num_bytes: int) -> int:
    """Rounded up to pages, the unit of mappings and of pinning."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
