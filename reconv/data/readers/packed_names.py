"""Many file names in little memory: their bytes in one piece and where each ends.

Owns the packing. Refuses to know what the names are of. Invariant: a name comes back as it went in, whatever its bytes.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Iterable

import numpy as np


class PackedNames:
    """A sequence of names: 8 bytes each plus the name itself."""

    def __init__(self, names: Iterable[str]) -> None:
        packed, ends = bytearray(), array("q", [0])
        for name in names:
            packed += os.fsencode(name)
            ends.append(len(packed))
        self._packed = np.frombuffer(packed, np.uint8)  # an array, which worker processes can share
        self._ends = np.frombuffer(ends, np.int64)

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: int) -> str:
        if not 0 <= index < len(self):
            raise IndexError(index)
        return os.fsdecode(self._packed[self._ends[index] : self._ends[index + 1]].tobytes())

    @property
    def num_bytes(self) -> int:
        """Memory held."""
        return self._packed.nbytes + self._ends.nbytes

    def content(self) -> tuple[memoryview, memoryview]:
        """All that decides the names, for a digest."""
        return self._packed.data, self._ends.data
