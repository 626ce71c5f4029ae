"""Memory that batches are filled into: a few slabs, used again and again.

Owns when a slab is free. Refuses to know who fills it and what is in it. Invariant: a slab is given out again only
when nobody holds an array or a tensor of its last lease, and when what was copied from it has arrived; how many there
are is bounded by how many are held at once.
"""

from __future__ import annotations

import mmap
import os
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.batch import Batch, Copied
from reconv.data.dataset import U8
from reconv.data.pipeline.sample_pipeline import Column, Rows

_ALIGN_BYTES = 64  # a cache line


class HostToDevice(Protocol):
    """How batches reach the device."""

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Make copies from this memory quick, where that means something; the result undoes it."""
        ...

    def send(self, batch: Batch) -> tuple[Batch, Copied | None]:
        """The batch on the device, ready for what is computed next there; None: nothing is copied any more."""
        ...


@dataclass(frozen=True, slots=True)
class Moving:
    """A carrier that moves tensor by tensor and never leaves a copy under way."""

    move: Callable[[Tensor], Tensor]

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """Ordinary memory stays as it is."""
        return _nothing

    def send(self, batch: Batch) -> tuple[Batch, Copied | None]:
        """The batch moved."""
        return batch.map(self.move), None


@dataclass(frozen=True, slots=True)
class Cast:
    """A carrier whose images travel as another type; the host converts them, which is exact."""

    carrier: HostToDevice
    dtype: torch.dtype

    def pin(self, memory: Tensor) -> Callable[[], None]:
        """The images are not sent from there, but copied first."""
        return _nothing

    def send(self, batch: Batch) -> tuple[Batch, Copied | None]:
        """The batch with its images converted."""
        return self.carrier.send(batch.replace(images=batch["images"].to(self.dtype)))


def as_type(carrier: HostToDevice, name: str) -> HostToDevice:
    """The carrier, or one that converts images where they are to travel as something else than uint8."""
    return carrier if name == "uint8" else Cast(carrier, getattr(torch, name))


def _nothing() -> None:
    """There is nothing to undo."""


@dataclass(frozen=True, slots=True)
class BufferField:
    """Where a column's rows lie in a slab."""

    name: str
    start: int
    shape: tuple[int, ...]
    dtype: str

    def of(self, slab: U8) -> npt.NDArray[Any]:
        """The rows."""
        num_bytes = int(np.prod(self.shape)) * np.dtype(self.dtype).itemsize
        return slab[self.start : self.start + num_bytes].view(self.dtype).reshape(self.shape)


def places(columns: tuple[Column, ...], num_rows: int) -> tuple[tuple[BufferField, ...], int]:
    """Where each column of so many rows lies, and how many bytes all take."""
    found, start = [], 0
    for column in columns:
        dtype, shape = np.dtype(column.dtype), (num_rows, *column.shape)
        found.append(BufferField(column.name, start, shape, dtype.str))
        start += -(-int(np.prod(shape)) * dtype.itemsize // _ALIGN_BYTES) * _ALIGN_BYTES
    return tuple(found), max(start, _ALIGN_BYTES)


@dataclass(eq=False, slots=True)
class Buffer:
    """Memory for the rows of one batch; `file` is a descriptor by which other processes map it."""

    memory: mmap.mmap
    file: int | None
    unpin: Callable[[], None] = _nothing
    is_dropped: bool = False

    @property
    def num_bytes(self) -> int:
        return len(self.memory)

    def drop(self) -> None:
        """Let go of it: it is never filled again."""
        self.unpin()
        self.is_dropped = True
        if self.file is not None:
            os.close(self.file)


@dataclass(frozen=True, slots=True)
class BufferView:
    """A slab that is being filled or used: its rows by name, and where they lie."""

    slab: Buffer
    rows: Rows
    places: tuple[BufferField, ...]


def ordinary_slab(num_bytes: int) -> Buffer:
    """Memory of this process."""
    return Buffer(mmap.mmap(-1, num_bytes), None)


class BufferPool:
    """The slabs of one stream of batches."""

    def __init__(self, carrier: HostToDevice, make: Callable[[int], Buffer], limit: int) -> None:
        self._carrier = carrier
        self._make = make
        self._limit = limit  # copies under way are waited for rather than making more slabs than this
        self._free: deque[Buffer] = deque()
        self._sent: deque[tuple[Rows, Copied]] = deque()
        self._num_slabs = 0
        self._is_closed = False

    @property
    def num_slabs(self) -> int:
        """How many slabs there are: filled, used, under way and free."""
        return self._num_slabs

    def take(self, columns: tuple[Column, ...], num_rows: int, most_rows: int) -> BufferView:
        """A slab for some rows, of a size that would hold `most_rows`."""
        self._collect()
        num_bytes = places(columns, most_rows)[1]
        slab = self._free_slab(num_bytes) or self._new_slab(num_bytes)
        cut = places(columns, num_rows)[0]
        # Every view of it has this array as its base, which is alive as long as any of them: the memory below is a
        # memoryview, and numpy does not look through that.
        whole = np.frombuffer(memoryview(slab.memory), np.uint8)
        weakref.finalize(whole, self._give_back, slab).atexit = False
        return BufferView(slab, {place.name: place.of(whole) for place in cut}, cut)

    def sent(self, rows: Rows, copied: Copied | None) -> None:
        """These rows are on their way; they are held until they have arrived."""
        if copied is not None:
            self._sent.append((rows, copied))

    def close(self) -> None:
        """Wait for what is under way; slabs that are still held are let go by whoever holds them."""
        while self._sent:
            self._sent.popleft()[1].synchronize()
        self._is_closed = True
        while self._free:
            self._drop(self._free.popleft())

    def _give_back(self, slab: Buffer) -> None:
        """Nobody holds the slab any more; called by whichever thread let go of it last."""
        if self._is_closed:
            self._drop(slab)
        else:
            self._free.append(slab)

    def _collect(self) -> None:
        """Let go of what has arrived."""
        while self._sent and self._sent[0][1].query():
            self._sent.popleft()
        if self._sent and not self._free and self._num_slabs >= self._limit:
            self._sent.popleft()[1].synchronize()

    def _free_slab(self, num_bytes: int) -> Buffer | None:
        while self._free:
            slab = self._free.popleft()
            if slab.num_bytes == _pages(num_bytes):
                return slab
            self._drop(slab)  # images have another size from here on
        return None

    def _new_slab(self, num_bytes: int) -> Buffer:
        slab = self._make(_pages(num_bytes))
        slab.unpin = self._carrier.pin(torch.frombuffer(slab.memory, dtype=torch.uint8))
        self._num_slabs += 1
        return slab

    def _drop(self, slab: Buffer) -> None:
        slab.drop()
        self._num_slabs -= 1


def _pages(num_bytes: int) -> int:
    """Whole pages, which is what a mapping and a pinned range are made of."""
    return -(-num_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
