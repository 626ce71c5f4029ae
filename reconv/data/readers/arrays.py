"""Images in memory: one uint8 array [n, channels, height, width] and its targets; used by digits and CIFAR."""

from __future__ import annotations

import hashlib
from threading import Lock

import numpy as np

from reconv.core.errors import DataError
from reconv.data.checked_rows import CheckedRows, WrongImages
from reconv.data.dataset import I64, U8, Sample

_hashing = Lock()  # one for all datasets: a lock in a dataset could not be sent to another process


class ArrayDataset:
    """A dataset whose samples are rows of an array."""

    def __init__(
        self,
        kind: str,
        images: U8,
        targets: I64,
        class_names: tuple[str, ...],
        origin: str,
        numbers: I64 | None = None,  # of the samples in the whole dataset; None: in this order
    ) -> None:
        bad = np.flatnonzero((targets < 0) | (targets >= len(class_names)))
        if len(bad):
            raise DataError(
                f"label {targets[bad[0]]} of sample {bad[0]} is out of range ({len(bad)} such labels)",
                where=origin,
                why=f"there are {len(class_names)} classes, 0 to {len(class_names) - 1}; the files may be damaged",
                hint="download or copy the data again",
            )
        self.kind = kind
        self.images = images
        self.targets = targets
        self.class_names = class_names
        self.origin = origin
        self._numbers = numbers
        # With engine.verify, rows are compared with their digests.
        self.checked_images: CheckedRows | None = None
        self.checked_targets: CheckedRows | None = None
        self._fingerprint: str | None = None

    def __len__(self) -> int:
        return len(self.targets)

    def __getitem__(self, index: int) -> Sample:
        """The image as [height, width, channels] and its class."""
        image, target = self.images[index], self.targets[index]
        if self.checked_images is not None and self.checked_targets is not None:
            rows = np.array([index])
            image, target = self.checked_images.take(rows)[0], self.checked_targets.take(rows)[0]
        pixels = np.ascontiguousarray(image.transpose(1, 2, 0))
        return Sample(pixels, int(target), f"{self.kind}[{self._number(index)}]")

    def _number(self, index: int) -> int:
        return index if self._numbers is None else int(self._numbers[index])

    def with_targets(self, targets: I64) -> ArrayDataset:
        """The same images with other classes."""
        return ArrayDataset(self.kind, self.images, targets, self.class_names, self.origin, self._numbers)

    def check_images(self, wrong: WrongImages) -> None:
        """From now on compare images and targets with their digests as they are now; keeps a second copy of them."""
        self.checked_images = CheckedRows(self.images, self.kind, wrong)
        self.checked_targets = CheckedRows(self.targets, f"labels of {self.kind}", wrong)

    def select(self, indices: I64) -> ArrayDataset:
        """The samples at the given indices, in that order."""
        origin = f"{self.origin}; {len(indices)} of {len(self)} samples"
        numbers = indices if self._numbers is None else self._numbers[indices]
        return ArrayDataset(self.kind, self.images[indices], self.targets[indices], self.class_names, origin, numbers)

    def fingerprint(self) -> str:
        """A digest of pixels and targets, computed once; waits for another thread that computes it."""
        with _hashing:
            if self._fingerprint is None:
                digest = hashlib.blake2b(repr((self.kind, self.images.shape)).encode(), digest_size=16)
                digest.update(np.ascontiguousarray(self.images).data)
                digest.update(np.ascontiguousarray(self.targets).data)
                self._fingerprint = digest.hexdigest()
            return self._fingerprint
