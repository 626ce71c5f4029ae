"""Images in memory with digests, for `engine.verify`: each is compared with its digest when it is used."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.data.dataset import I64, U8

_WORD_BYTES = 8


@dataclass(slots=True)
class WrongImages:
    """The names of images that were wrong in memory; added to by the threads that read images."""

    _names: list[str] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def add(self, name: str) -> None:
        with self._lock:
            self._names.append(name)

    def take(self) -> list[str]:
        """The names since the last call."""
        with self._lock:
            taken, self._names = self._names, []
        return taken


def digest_of(data: bytes | U8) -> tuple[int, int]:
    """Sums of the 8-byte words and of the bytes after them, which any change within one word changes."""
    content = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else np.ascontiguousarray(data).reshape(-1)
    whole = len(content) // _WORD_BYTES * _WORD_BYTES
    return int(content[:whole].view(np.uint64).sum()), int(content[whole:].sum())


class CheckedRows:
    """Rows of an array, each compared with its digest when it is taken, and repaired from a second copy."""

    def __init__(self, rows: npt.NDArray[Any], name: str, wrong: WrongImages) -> None:
        self._rows = rows
        self._copy = rows.copy()
        self._digests = _row_digests(self._copy)
        self._name = name
        self.wrong = wrong

    def __len__(self) -> int:
        return len(self._rows)

    def take(self, indices: I64) -> npt.NDArray[Any]:
        """Copies of rows."""
        taken = self._rows[indices]
        for number in np.flatnonzero(_row_digests(taken) != self._digests[indices]).tolist():
            index = int(indices[number])
            self.wrong.add(f"{self._name}[{index}]")
            self._rows[index] = self._copy[index]
            taken[number] = self._copy[index]
        return taken


def _row_digests(rows: npt.NDArray[Any]) -> npt.NDArray[np.uint64]:
    """The sum of the words of each row, or of its bytes where they are no whole words."""
    content = np.ascontiguousarray(rows).reshape(len(rows), -1).view(np.uint8)
    is_whole = content.shape[1] % _WORD_BYTES == 0
    digests: npt.NDArray[np.uint64] = (content.view(np.uint64) if is_whole else content).sum(axis=1, dtype=np.uint64)
    return digests
