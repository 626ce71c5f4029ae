"""What a source of samples is: a length, random access, class names and a fingerprint.

Owns the protocol, the promise of sources that lie in files, and the views of a source. Refuses to know decoding and
order. Invariant: `sample(i)` depends on i alone and may be called from many threads at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np
import numpy.typing as npt

from reconv.errors import DataError

if TYPE_CHECKING:
    from reconv.data.boxes.annotations import Annotation

U8 = npt.NDArray[np.uint8]
I64 = npt.NDArray[np.int64]
Split = Literal["train", "val"]


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample: an encoded file or pixels [height, width, channels], its class and a name a person can find.

    An image with boxes has an annotation, and no class of its own.
    """

    data: bytes | U8
    target: int
    name: str
    annotation: Annotation | None = None


class LabelError(DataError):
    """A label that is wrong: the list is, which no missing image excuses."""


BACKGROUND = "background"


class Dataset(Protocol):
    """Samples by index."""

    @property
    def kind(self) -> str: ...
    @property
    def class_names(self) -> tuple[str, ...]: ...
    @property
    def origin(self) -> str:
        """One line for people: what this is and how it was recognised."""
        ...

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...
    def fingerprint(self) -> str:
        """A digest that changes when the samples, their order or their targets do."""
        ...


Files = tuple[Sequence[bytes], npt.NDArray[np.integer]]  # a path and a class for each sample


class InFiles(ABC):
    """A source whose samples may be files of their own, so that whoever knows paths can read many at once."""

    @abstractmethod
    def files(self, indices: I64) -> Files | None:
        """Files whose bytes are the data of these samples, and their classes; None where there are no such files."""


def files_of(source: Dataset, indices: I64) -> Files | None:
    """The files of samples, if their source has some."""
    return source.files(indices) if isinstance(source, InFiles) else None


class Subset(InFiles):
    """Some samples of a source, in the given order."""

    def __init__(self, source: Dataset, indices: I64) -> None:
        self._source = source
        self._indices = indices
        self.kind = source.kind
        self.class_names = source.class_names
        self.origin = f"{source.origin}; {len(indices)} of {len(source)} samples"

    def __len__(self) -> int:
        return len(self._indices)

    def __getitem__(self, index: int) -> Sample:
        """The source's sample behind the index."""
        return self._source[int(self._indices[index])]

    def files(self, indices: I64) -> Files | None:
        """The source's files behind the indices."""
        return files_of(self._source, self._indices[indices])

    def fingerprint(self) -> str:
        """The source's digest with the share taken."""
        return f"{self._source.fingerprint()}/{len(self._indices)}"


class WithBackground(InFiles):
    """A source whose classes are counted from 1: class 0 is a background that no sample has."""

    def __init__(self, source: Dataset) -> None:
        self._source = source
        self.kind = source.kind
        self.class_names = (BACKGROUND, *source.class_names)
        self.origin = f"{source.origin}; class 0 is the background"

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int) -> Sample:
        """The source's sample, its class one higher."""
        sample = self._source[index]
        return Sample(sample.data, sample.target + 1, sample.name)

    def files(self, indices: I64) -> Files | None:
        """The source's files, their classes one higher."""
        found = files_of(self._source, indices)
        return None if found is None else (found[0], found[1] + 1)

    def fingerprint(self) -> str:
        """The source's digest with the shift."""
        return f"{self._source.fingerprint()}+1"


def spread(num_samples: int, percent: float) -> I64:
    """Indices of `percent` of the samples (at least one), evenly spread so that sorted classes keep their shares."""
    num_kept = max(1, round(num_samples * percent / 100))
    return np.arange(num_kept, dtype=np.int64) * num_samples // num_kept
