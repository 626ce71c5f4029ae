"""Map-style datasets: the protocol, and views that select samples or shift classes.

`dataset[i]` depends on i alone and may be called from many threads at once.

Classes are matched by `class_names` (folder names, wnids). Names for people are display only and change neither order
nor fingerprint (tests/data/readers/test_class_name_files.py).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from reconv.core.errors import DataError
from reconv.storage import read_limits
from reconv.storage.remote_tree import is_remote, shown_path

if TYPE_CHECKING:
    from reconv.detection.annotation import Annotation

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
F64 = npt.NDArray[np.float64]
NamedArrays = Mapping[str, npt.NDArray[Any]]  # each with one row per sample
Split = Literal["train", "val", "test"]

BACKGROUND = "background"


@dataclass(frozen=True, slots=True)
class Sample:
    """An encoded image or its pixels [height, width, channels], the class index, and a name to find the file by.

    For detection `annotation` holds the boxes, for multi-label data `labels` the class indices; `target` is not used.
    """

    data: bytes | U8
    target: int
    name: str
    annotation: Annotation | None = None
    labels: tuple[int, ...] | None = None

    def fill_target(self, row: npt.NDArray[Any]) -> None:
        """Write the class index [], or the labels as a multi-hot row [classes]."""
        row[...] = self.target if self.labels is None else multi_hot(self.labels, len(row))


def multi_hot(labels: Sequence[int], num_classes: int) -> npt.NDArray[np.float32]:
    """1 for the classes that occur, 0 for the others."""
    row = np.zeros(num_classes, np.float32)
    row[list(labels)] = 1
    return row


class LabelError(DataError):
    """A wrong label or annotation: always an error, even where unreadable images are tolerated."""


def name_problem(name: str) -> str | None:
    """Problem with a class name, or None."""
    if len(name) > read_limits.CLASS_NAME_CHARS:
        return (
            f"a class name has {len(name):,} characters, more than {read_limits.CLASS_NAME_CHARS:,}: {name[:40]!r}..."
        )
    if any("\ud800" <= letter <= "\udfff" for letter in name):
        return f"a class name is not valid Unicode: {name!r:.80}"
    return None


def check_class_names(names: Sequence[str], where: str) -> None:
    """Raise where there are more classes than supported, or names that cannot be saved and shown."""
    problem = next(filter(None, map(name_problem, names)), None)
    if len(names) > read_limits.CLASSES:
        problem = f"there are {len(names):,} classes, more than {read_limits.CLASSES:,}"
    if problem is not None:
        hint = "correct the labels or the names; docs/how-to/data.md lists the limits"
        raise DataError("these classes are not supported", where=where, why=problem, hint=hint)


class Dataset(Protocol):
    """Samples by index."""

    @property
    def kind(self) -> str: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def origin(self) -> str:
        """One line for people: what the data is and how it was recognized."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def fingerprint(self) -> str:
        """A digest that changes when the samples, their order or their targets do."""
        ...


def is_multilabel(dataset: Dataset) -> bool:
    """True if an image may have several labels, or none."""
    return bool(getattr(dataset, "is_multilabel", False))


def all_targets(dataset: Dataset) -> I64:
    """The target of each sample [n], or multi-hot rows [n, classes]: a dataset's `targets` where it has them, as
    torchvision's do, else read one by one."""
    targets = getattr(dataset, "targets", None)
    if targets is not None:
        return np.asarray(targets, np.int64)
    rows = np.zeros((len(dataset), len(dataset.class_names)) if is_multilabel(dataset) else len(dataset), np.int64)
    for index in range(len(dataset)):
        dataset[index].fill_target(rows[index, ...])
    return rows


def class_counts(dataset: Dataset) -> tuple[int, ...]:
    """The number of samples of each class."""
    targets, num_classes = all_targets(dataset), len(dataset.class_names)
    counts = targets.sum(axis=0) if targets.ndim == 2 else np.bincount(targets, minlength=num_classes)
    return tuple(counts.tolist())


SampleFiles = tuple[Sequence[bytes], npt.NDArray[Any]]  # path and class index, or multi-hot row, of each sample


ByteRange = tuple[str, int, int | None]  # path, start and length; None: to the end of the file


class RangeBacked(ABC):
    """A dataset that knows where its samples lie, so that they can be fetched before they are read."""

    @abstractmethod
    def ranges(self, indices: I64) -> list[ByteRange]:
        """The bytes of each sample; none if they are not in files."""


class FileBacked(RangeBacked):
    """A dataset whose samples may be whole files, so that the compiled decoder can read many of them in one call."""

    @abstractmethod
    def files(self, indices: I64) -> SampleFiles | None:
        """Paths and classes of the samples; None if the samples are not files of their own."""

    def ranges(self, indices: I64) -> list[ByteRange]:
        found = self.files(indices)
        return [] if found is None else [(os.fsdecode(path), 0, None) for path in found[0]]


def sample_files(dataset: Dataset, indices: I64) -> SampleFiles | None:
    """Paths and classes of the samples; None if the dataset has no such files, or they are in an object store."""
    found = dataset.files(indices) if isinstance(dataset, FileBacked) else None
    return None if found is None or (len(found[0]) and is_remote(found[0][0])) else found


def sample_paths(dataset: Dataset) -> list[str]:
    """The file of each sample as users call it, or its name in data that is not files."""
    indices = np.arange(len(dataset), dtype=np.int64)
    files = dataset.files(indices) if isinstance(dataset, FileBacked) else None
    if files is not None:
        return [shown_path(os.fsdecode(path)) for path in files[0]]
    return [dataset[index].name for index in range(len(dataset))]


def sample_ranges(dataset: Dataset, indices: I64) -> list[ByteRange]:
    """Byte ranges of the samples; empty if the dataset does not know them."""
    return dataset.ranges(indices) if isinstance(dataset, RangeBacked) else []


class Subset(FileBacked):
    """The samples of a dataset at the given indices, in that order."""

    def __init__(self, dataset: Dataset, indices: I64) -> None:
        self._dataset = dataset
        self._indices = indices
        self.kind = dataset.kind
        self.class_names = dataset.class_names
        self.is_multilabel = is_multilabel(dataset)
        self.origin = f"{dataset.origin}; {len(indices)} of {len(dataset)} samples"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        return self._dataset[int(self._indices[index])]

    @property
    def targets(self) -> I64:
        return all_targets(self._dataset)[self._indices]

    def files(self, indices: I64) -> SampleFiles | None:
        return sample_files(self._dataset, self._indices[indices])

    def ranges(self, indices: I64) -> list[ByteRange]:
        return sample_ranges(self._dataset, self._indices[indices])

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}/{len(self._indices)}"


class WithBackground(FileBacked):
    """A dataset with a background class 0 in front: no sample has it, and every target is one higher."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset
        self.kind = dataset.kind
        self.class_names = (BACKGROUND, *dataset.class_names)
        self.origin = f"{dataset.origin}; class 0 is the background"

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        return Sample(sample.data, sample.target + 1, sample.name)

    @property
    def targets(self) -> I64:
        return all_targets(self._dataset) + 1

    def files(self, indices: I64) -> SampleFiles | None:
        found = sample_files(self._dataset, indices)
        return None if found is None else (found[0], found[1] + 1)

    def ranges(self, indices: I64) -> list[ByteRange]:
        return sample_ranges(self._dataset, indices)

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}+1"


class Relabeled(FileBacked):
    """A dataset with other class names: class i of the dataset is class `numbers[i]` of `class_names`."""

    def __init__(self, dataset: Dataset, class_names: tuple[str, ...], numbers: Sequence[int]) -> None:
        self._dataset = dataset
        self._numbers = np.array(numbers, np.int64)
        self.kind = dataset.kind
        self.class_names = class_names
        self.is_multilabel = is_multilabel(dataset)
        self.origin = describe_relabeled(dataset, class_names)

    def __len__(self) -> int:
        return len(self._dataset)

    def __getitem__(self, index: int) -> Sample:
        sample = self._dataset[index]
        if sample.labels is None:
            return replace(sample, target=int(self._numbers[sample.target]))
        return replace(sample, labels=tuple(int(self._numbers[label]) for label in sample.labels))

    @property
    def targets(self) -> I64:
        return self._relabel(all_targets(self._dataset))

    def files(self, indices: I64) -> SampleFiles | None:
        found = sample_files(self._dataset, indices)
        return None if found is None else (found[0], self._relabel(found[1]))

    def ranges(self, indices: I64) -> list[ByteRange]:
        return sample_ranges(self._dataset, indices)

    def fingerprint(self) -> str:
        return f"{self._dataset.fingerprint()}/{'-'.join(map(str, self._numbers))}"

    def _relabel(self, targets: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Class indices [n] or multi-hot rows [n, classes] in the new order."""
        if targets.ndim == 1:
            indices: I64 = self._numbers[targets]
            return indices
        rows: npt.NDArray[Any] = np.zeros((len(targets), len(self.class_names)), targets.dtype)
        rows[:, self._numbers] = targets
        return rows


def describe_relabeled(dataset: Dataset, class_names: tuple[str, ...]) -> str:
    """The origin of a dataset whose classes were matched by name."""
    return f"{dataset.origin}; {len(dataset.class_names):,} of {len(class_names):,} classes, matched by name"


def select_rows(arrays: NamedArrays, rows: int | slice) -> NamedArrays:
    """The same row or rows of every array."""
    return {name: array[rows] for name, array in arrays.items()}


def evenly_spaced(num_samples: int, percent: float) -> I64:
    """Indices of `percent` of the samples (at least one), evenly spaced so that sorted classes keep their shares."""
    return at_most(num_samples, max(1, round(num_samples * percent / 100)))


def at_most(num_samples: int, limit: int) -> I64:
    """Up to `limit` indices of the samples, evenly spaced."""
    num_kept = min(num_samples, limit)
    return np.arange(num_kept, dtype=np.int64) * num_samples // max(1, num_kept)
