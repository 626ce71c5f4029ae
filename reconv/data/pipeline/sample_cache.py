"""Samples kept in memory as they were read: encoded files, or pixels where the data has pixels.

Owns what is kept and the room it may take. Refuses to know files, decoding and how much memory a machine has.
Invariant: a sample is the source's own; what is kept never exceeds the room, and what does not fit is read again.
"""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cached_property

import numpy as np

from reconv.data.boxes.annotations import Annotation, DetectionDataset
from reconv.data.dataset import I64, Dataset, Sample, evenly_spaced
from reconv.errors import DataError

_OVERHEAD_BYTES = 400  # of a kept sample beside its data: the objects, its name, the place in the table; measured 340
_NUM_SAMPLED = 64


class CacheBudget:
    """Bytes that may be kept, shared by the sources of a run."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, num_bytes: int) -> bool:
        """Take so many bytes for good, or none where they do not fit."""
        with self._lock:
            if self._used_bytes + num_bytes > self.limit_bytes:
                return False
            self._used_bytes += num_bytes
            return True


class Cached:
    """A source whose samples are read once, as far as there is room."""

    def __init__(self, source: Dataset, room: CacheBudget) -> None:
        self._source = source
        self._room = room
        self._kept: dict[int, Sample] = {}
        self._lock = threading.Lock()
        self.kind = source.kind
        self.class_names = source.class_names
        self.origin = source.origin

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        """The source's sample, from memory where it was read before."""
        kept = self._kept.get(index)
        if kept is not None:
            return kept
        sample = self._source[index]
        with self._lock:  # two threads that miss together must not pay twice
            if index not in self._kept and self._room.take(num_bytes(sample)):
                self._kept[index] = _own(sample)
        return sample

    def fingerprint(self) -> str:
        """The source's digest."""
        return self._source.fingerprint()

    @property
    def room_bytes(self) -> int:
        """The room there is, for all sources that share it."""
        return self._room.limit_bytes

    @cached_property
    def estimated_bytes(self) -> int:
        """What keeping every sample would take, by a few of them spread over the set."""
        indices = evenly_spaced(len(self), 100 * min(1, _NUM_SAMPLED / len(self)))
        sizes = [size for index in indices if (size := self._size(int(index))) is not None]
        return round(len(self) * sum(sizes) / len(sizes)) if sizes else 0

    def _size(self, index: int) -> int | None:
        try:
            return num_bytes(self._source[index])
        except DataError:  # whether it ends the run or is left out is decided where it is needed
            return None


class CachedDetection(Cached, DetectionDataset):
    """The same for images with boxes, whose annotations are in memory anyway or cheap to read."""

    def __init__(self, source: DetectionDataset, room: CacheBudget) -> None:
        super().__init__(source, room)
        self._boxed = source
        self.class_ids = source.class_ids

    def annotation(self, index: int) -> Annotation:
        """The source's boxes."""
        return self._boxed.annotation(index)

    def box_counts(self) -> I64:
        """The source's counts."""
        return self._boxed.box_counts()


def cached(source: Dataset, room: CacheBudget) -> Cached:
    """A source that keeps what it has read."""
    return CachedDetection(source, room) if isinstance(source, DetectionDataset) else Cached(source, room)


def num_bytes(sample: Sample) -> int:
    """What keeping a sample takes."""
    size = len(sample.data) if isinstance(sample.data, bytes) else sample.data.nbytes
    return size + _OVERHEAD_BYTES


def _own(sample: Sample) -> Sample:
    """The sample with pixels of its own: a view would hold on to a mapped file, not to memory."""
    return sample if isinstance(sample.data, bytes) else replace(sample, data=np.copy(sample.data))
