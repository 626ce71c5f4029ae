"""Images that cannot be read or decoded while a run goes on: which they are, how many are borne, who stands in.

Owns the list of a run's bad files, its limit and the rule of replacement. Refuses to know threads, batches and events.
Invariant: a file is told once, stays out for the rest of the run (also after a resume), and the stand-in for it is a
function of (seed, epoch, index) and of which files are bad; workers, ranks and reading ahead change nothing.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reconv.data.dataset import Split
from reconv.errors import DataError
from reconv.random import hash_array, key

_SHOWN = 5
_TWO = np.arange(2)


@dataclass(frozen=True, slots=True)
class BadSample:
    """One bad file: met when `step` steps were done."""

    split: Split
    index: int
    step: int
    path: str
    why: str


def _untold(fault: BadSample) -> None:
    """Nobody asked."""


class BadSamples:
    """The bad files of a run so far; `limit` 0 bears none."""

    def __init__(
        self,
        limit: int = 0,
        tell: Callable[[BadSample], None] = _untold,
        gather: Callable[[list[BadSample]], list[list[BadSample]]] | None = None,
    ) -> None:
        """`gather` gives what each of several processes has; they count together."""
        self._limit = limit
        self._tell = tell
        self._gather = gather
        self._found: list[BadSample] = []
        self._fresh: list[BadSample] = []  # found here, and not yet known to other processes
        self._known: dict[Split, set[int]] = {"train": set(), "val": set()}

    @property
    def borne(self) -> bool:
        """Whether a bad file is left out, rather than ending the run."""
        return self._limit > 0

    def known(self, split: Split) -> Collection[int]:
        """The indices that are out."""
        return self._known[split]

    def add(self, split: Split, index: int, step: int, error: DataError) -> None:
        """Leave a file out from now on; an error once there are more than the limit, here or when all have settled."""
        if not self.borne:
            raise error
        if index in self._known[split]:
            return
        path = os.fsencode(error.where or f"{split} sample {index}").decode("utf-8", "backslashreplace")
        fault = BadSample(split, index, step, path, error.why or error.what)
        self._known[split].add(index)
        self._fresh.append(fault)
        # Beyond the limit there is nothing to wait for: the other processes meet this one in their own settling.
        if self._gather is None or len(self._found) + len(self._fresh) > self._limit:
            self.settle()

    def settle(self) -> None:
        """Count what all processes have found since the last time, in the order of one process; all call this.

        Once a step and once an evaluation, where files are borne.
        """
        if not self.borne:
            return
        fresh, self._fresh = self._fresh, []
        shares = [fresh] if self._gather is None else self._gather(fresh)
        seen = {(fault.split, fault.index) for fault in self._found}
        for fault in (fault for share in shares for fault in share):
            if (fault.split, fault.index) not in seen:
                seen.add((fault.split, fault.index))
                self._count(fault)

    def _count(self, fault: BadSample) -> None:
        self._keep(fault)
        self._tell(fault)
        if len(self._found) > self._limit:
            last = self._found[-_SHOWN:]
            raise DataError(
                f"{len(self._found):,} images cannot be read, and data.bad_images bears {self._limit:,}",
                where=", ".join(shown.path for shown in last),
                why=f"the last of them: {fault.why}",
                then="reconv data check PATH lists them all; repair or remove them, or raise data.bad_images",
            )

    def state(self, steps_done: int) -> list[dict[str, Any]]:
        """What a checkpoint keeps: the files met up to its step, whatever was read ahead."""
        return [asdict(fault) for fault in self._found if fault.split == "val" or fault.step < steps_done]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Go on counting where a checkpoint was; nothing is told again."""
        for saved in state:
            self._keep(BadSample(**saved))

    def _keep(self, fault: BadSample) -> None:
        self._found.append(fault)
        self._known[fault.split].add(fault.index)


def replacements(seed: int, epoch: int, index: int, num_samples: int) -> Iterator[int]:
    """Every sample once, in an order of its own for each (seed, epoch, index): the first good one stands in.

    A stride through the whole set rather than the neighbours, which in a sorted tree are of the same class and may be
    bad for the same reason.
    """
    base = key(seed, "stand-in", epoch, index)
    start, stride = (int(value) % num_samples for value in hash_array(base, _TWO))
    while math.gcd(stride, num_samples) != 1:
        stride += 1
    return ((start + step * stride) % num_samples for step in range(num_samples))
