"""Lists of many file names in little memory, and a digest of the files they name."""

from __future__ import annotations

import hashlib
import os
from array import array
from collections.abc import Callable, Iterable

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import at_most
from reconv.storage.local import size_bytes

MAX_SIZES = 4096  # files whose size goes into a digest: asking for a million sizes takes minutes on a network disk


class FileList:
    """A sequence of file names in 8 bytes each plus the name itself; names may be any bytes."""

    def __init__(self, names: Iterable[str]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for name in names:
            packed += os.fsencode(name)
            ends.append(len(packed))
        self._packed = np.frombuffer(packed, np.uint8)  # arrays, because worker processes can share them
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self._packed[self._ends[index] : self._ends[index + 1]].tobytes())

    def encoded(self, indices: npt.NDArray[np.int64]) -> list[bytes]:
        """The names at these indices, as bytes."""
        packed = self._packed.data
        bounds = zip(self._ends[indices].tolist(), self._ends[indices + 1].tolist(), strict=True)
        return [bytes(packed[start:end]) for start, end in bounds]

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._packed.nbytes + self._ends.nbytes

    def content(self) -> tuple[memoryview, memoryview]:
        """The names as bytes, for a digest."""
        return self._packed.data, self._ends.data


def digest_files(
    class_names: tuple[str, ...], names: FileList, targets: npt.NDArray[np.integer], path: Callable[[int], str]
) -> str:
    """A digest of all names and targets, and of the sizes of up to 4096 files spread over the list."""
    digest = hashlib.blake2b("\0".join(class_names).encode("utf-8", "surrogateescape"), digest_size=16)
    for chunk in (*names.content(), targets.data):
        digest.update(chunk)
    for index in at_most(len(names), MAX_SIZES):
        digest.update(size_bytes(path(int(index))).to_bytes(8, "little"))
    return digest.hexdigest()
