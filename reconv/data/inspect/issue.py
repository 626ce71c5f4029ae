"""What is told of a data set that is looked at.

Owns the word for it. Refuses to know what may be found. Invariant: a path in it is text, whatever bytes a name has.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from reconv.data.dataset import Split

SPLITS: tuple[Split, ...] = ("train", "val")


@dataclass(frozen=True, slots=True)
class DataIssue:
    """Something a person should know of a data set; a fault is what training would stop at or be misled by."""

    level: Literal["fault", "warning"]
    kind: str
    text: str
    paths: tuple[str, ...] = ()
    count: int = 0  # where not every path is named; 0: all are

    @property
    def total(self) -> int:
        return self.count or len(self.paths)


Tell = Callable[[DataIssue], None]


def printable(name: str) -> str:
    """A file name as text, whatever bytes it is made of."""
    return os.fsencode(name).decode("utf-8", "backslashreplace")
