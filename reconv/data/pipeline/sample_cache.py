"""Datasets whose samples stay in memory as they were read: encoded files, or pixels where the data has pixels."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import cached_property

import numpy as np

from reconv.core.errors import DataError
from reconv.data.boxes.annotations import DetectionDataset
from reconv.data.checked_rows import WrongImages, digest_of
from reconv.data.dataset import (
    I64,
    ByteRange,
    Dataset,
    RangeBacked,
    Sample,
    all_targets,
    at_most,
    is_multilabel,
    sample_ranges,
)
from reconv.detection.annotation import Annotation

_OVERHEAD_BYTES = 400  # of a cached sample beside its data: objects, name, entry in the dict; measured 340
_NUM_SAMPLED = 64


class CacheBudget:
    """Bytes that may be cached, shared by the datasets of a run."""

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        self._used_bytes = 0
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        return self._used_bytes

    def take(self, num_bytes: int) -> bool:
        """Reserve `num_bytes` for good; False if they do not fit."""
        with self._lock:
            if self._used_bytes + num_bytes > self.limit_bytes:
                return False
            self._used_bytes += num_bytes
            return True


class CachedDataset(RangeBacked):
    """Reads each sample of a dataset once, as far as the budget goes; the others are read every time."""

    def __init__(self, dataset: Dataset, budget: CacheBudget) -> None:
        self._dataset = dataset
        self._budget = budget
        self._cache: dict[int, Sample] = {}
        self._wrong: WrongImages | None = None
        self._digests: dict[int, tuple[int, int]] = {}
        self._lock = threading.Lock()
        self.kind = dataset.kind
        self.class_names = dataset.class_names
        self.origin = dataset.origin
        self.is_multilabel = is_multilabel(dataset)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        cached = self._cache.get(index)
        if cached is not None and (self._wrong is None or digest_of(cached.data) == self._digests[index]):
            return cached
        sample = self._dataset[index]
        if cached is not None and self._wrong is not None:
            self._wrong.add(cached.name)
            self._keep(index, sample)
            return sample
        with self._lock:  # two threads that miss together must not pay twice
            if index not in self._cache and self._budget.take(num_bytes(sample)):
                self._keep(index, sample)
        return sample

    def _keep(self, index: int, sample: Sample) -> None:
        kept = _own(sample)
        if self._wrong is not None:
            self._digests[index] = digest_of(kept.data)
        self._cache[index] = kept

    def check_images(self, wrong: WrongImages) -> None:
        """Compare each image with its digest when it is used; one that is wrong is read again."""
        self._wrong = wrong

    @property
    def targets(self) -> I64:
        return all_targets(self._dataset)

    def ranges(self, indices: I64) -> list[ByteRange]:
        """Byte ranges of the samples that are not cached yet."""
        missing = [index for index in indices.tolist() if index not in self._cache]
        return sample_ranges(self._dataset, np.array(missing, np.int64))

    def fingerprint(self) -> str:
        return self._dataset.fingerprint()

    @property
    def budget_bytes(self) -> int:
        """The budget of all datasets that share it."""
        return self._budget.limit_bytes

    @cached_property
    def estimated_bytes(self) -> int:
        """Bytes that caching every sample would take, estimated from a few of them."""
        indices = at_most(len(self), _NUM_SAMPLED)
        sizes = [size for index in indices if (size := self._size(int(index))) is not None]
        return round(len(self) * sum(sizes) / len(sizes)) if sizes else 0

    def _size(self, index: int) -> int | None:
        try:
            return num_bytes(self._dataset[index])
        except DataError:  # the loader reports it or leaves it out
            return None


class CachedDetectionDataset(CachedDataset, DetectionDataset):
    """The same for detection; annotations are in memory anyway, or cheap to read."""

    def __init__(self, dataset: DetectionDataset, budget: CacheBudget) -> None:
        super().__init__(dataset, budget)
        self._detection = dataset
        self.class_ids = dataset.class_ids

    def annotation(self, index: int) -> Annotation:
        return self._detection.annotation(index)

    def box_counts(self) -> I64:
        return self._detection.box_counts()


def cache_samples(dataset: Dataset, budget: CacheBudget) -> CachedDataset:
    """A dataset that caches what it has read."""
    if isinstance(dataset, DetectionDataset):
        return CachedDetectionDataset(dataset, budget)
    return CachedDataset(dataset, budget)


def num_bytes(sample: Sample) -> int:
    """The memory that a cached sample takes."""
    size = len(sample.data) if isinstance(sample.data, bytes) else sample.data.nbytes
    return size + _OVERHEAD_BYTES


def _own(sample: Sample) -> Sample:
    """The sample with a copy of its pixels: a view would keep a mapped file, not memory."""
    return sample if isinstance(sample.data, bytes) else replace(sample, data=np.copy(sample.data))
