"""Annotations of images with boxes, and the base class of datasets that have them.

Boxes are absolute pixels (x1, y1, x2, y2) of the stored image. Labels index the dataset's class names; `class_ids` has
the numbers that the files use.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from reconv.data.dataset import I64, LabelError, Sample, describe_relabeled
from reconv.detection.annotation import Annotation

NO_TARGET = -1  # the target of a sample with boxes


class AnnotationError(LabelError):
    """Boxes or annotation files that are wrong."""


class DetectionDataset(ABC):
    """A `Dataset` of images with boxes; the target of its samples is `NO_TARGET`."""

    kind: str
    class_names: tuple[str, ...]
    class_ids: tuple[int, ...]  # the id of each class in the files
    origin: str
    notes: tuple[str, ...] = ()  # what was left out, for people

    @abstractmethod
    def __len__(self) -> int: ...

    @abstractmethod
    def __getitem__(self, index: int) -> Sample:
        """The image with its annotation."""

    @abstractmethod
    def annotation(self, index: int) -> Annotation:
        """The boxes, without reading pixels."""

    @abstractmethod
    def box_counts(self) -> I64:
        """The number of boxes of each image."""

    @abstractmethod
    def fingerprint(self) -> str:
        """A digest that changes when the images, their order or their boxes do."""


class RelabeledDetection(DetectionDataset):
    """A dataset with other class names: class i of the dataset is class `numbers[i]` of `class_names`."""

    def __init__(self, source: DetectionDataset, class_names: tuple[str, ...], numbers: Sequence[int]) -> None:
        self._source = source
        self._numbers = np.array(numbers, np.int64)
        self.kind = source.kind
        self.class_names = class_names
        ids = dict(zip(numbers, source.class_ids, strict=True))
        self.class_ids = tuple(ids.get(number, -1) for number in range(len(class_names)))
        self.notes = source.notes
        self.origin = describe_relabeled(source, class_names)

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        """The source's image with the new labels."""
        sample = self._source[index]
        assert sample.annotation is not None
        return replace(sample, annotation=self._relabel(sample.annotation))

    def annotation(self, index: int) -> Annotation:
        """The source's boxes with the new labels."""
        return self._relabel(self._source.annotation(index))

    def box_counts(self) -> I64:
        """The source's counts."""
        return self._source.box_counts()

    def fingerprint(self) -> str:
        """The source's digest with the new labels."""
        return f"{self._source.fingerprint()}/{'-'.join(map(str, self._numbers))}"

    def _relabel(self, annotation: Annotation) -> Annotation:
        return replace(annotation, labels=self._numbers[annotation.labels])


class DetectionSubset(DetectionDataset):
    """The images of a dataset at the given indices, in that order."""

    def __init__(self, source: DetectionDataset, indices: I64, why: str = "") -> None:
        self._source = source
        self._indices = indices
        self.kind = source.kind
        self.class_names = source.class_names
        self.class_ids = source.class_ids
        self.notes = source.notes
        self.origin = f"{source.origin}; {len(indices):,} of {len(source):,} images{why}"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        """The source's image behind the index."""
        return self._source[int(self._indices[index])]

    def annotation(self, index: int) -> Annotation:
        """The source's boxes behind the index."""
        return self._source.annotation(int(self._indices[index]))

    def box_counts(self) -> I64:
        """The source's counts behind the indices."""
        return self._source.box_counts()[self._indices]

    def fingerprint(self) -> str:
        """The source's digest with the indices taken."""
        return f"{self._source.fingerprint()}/{hashlib.blake2b(self._indices.tobytes(), digest_size=8).hexdigest()}"
