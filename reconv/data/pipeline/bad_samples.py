"""Images that cannot be read or decoded during a run: the list, its limit, and which samples replace them.

A bad sample is logged once and stays out for the rest of the run, also after a resume. Its replacement is a function
of (seed, epoch, index) and of which samples are bad; workers, ranks and prefetching change nothing.

A bad sample is decided when steps are handed out in order, so the list in a checkpoint depends on its step alone;
evaluation leaves such images out and says so (tests/laws/test_law_bad_images.py).
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from reconv.core.errors import DataError, UnreadableDataError
from reconv.core.message import message
from reconv.core.random import hash_array, key
from reconv.data.dataset import LabelError, Split

TOLERATE = "to leave out up to 10 such images: --set 'data.bad_images=skip up to 10'"
_NUM_SHOWN = 5


@message
@dataclass(frozen=True, slots=True)
class BadSample:
    """One bad sample, met when `step` steps were done."""

    split: Split
    index: int
    step: int
    path: str
    why: str


def _no_log(sample: BadSample) -> None:
    pass


class BadSamples:
    """The bad samples of a run so far; with a `limit` of 0 the first one is an error."""

    def __init__(
        self,
        limit: int = 0,
        log: Callable[[BadSample], None] = _no_log,
        all_gather: Callable[[list[BadSample]], list[list[BadSample]]] | None = None,
        hint: str = TOLERATE,
    ) -> None:
        """`all_gather` gives what each rank has found; the limit is for all ranks together.

        `hint` says what to type to go on without bad samples.
        """
        self._limit = limit
        self._log = log
        self._all_gather = all_gather
        self._hint = hint
        self._found: list[BadSample] = []
        self._new: list[BadSample] = []  # found on this rank and not yet known to others
        self._known: dict[Split, set[int]] = {"train": set(), "val": set()}

    @property
    def tolerated(self) -> bool:
        """True if a bad sample is left out rather than ending the run."""
        return self._limit > 0

    def known(self, split: Split) -> Collection[int]:
        """The indices of bad samples."""
        return self._known[split]

    def add(self, split: Split, index: int, step: int, error: DataError) -> None:
        """Leave a sample out from now on; raises once there are more than the limit, here or in `sync`."""
        if isinstance(error, UnreadableDataError):
            raise error
        if not self.tolerated:
            raise self.explain(error)
        if index in self._known[split]:
            return
        path = os.fsencode(error.where or f"{split} sample {index}").decode("utf-8", "backslashreplace")
        sample = BadSample(split, index, step, path, error.why or error.what)
        self._known[split].add(index)
        self._new.append(sample)
        # Beyond the limit there is nothing to wait for: the other ranks meet this one in their own `sync`.
        if self._all_gather is None or len(self._found) + len(self._new) > self._limit:
            self.sync()

    def explain(self, error: DataError) -> DataError:
        """The error of a bad sample that is not tolerated, with what to type to tolerate it."""
        if not isinstance(error, LabelError) and self._hint not in error.hint:
            error.hint = f"{error.hint}; {self._hint}" if error.hint else self._hint
        return error

    def sync(self) -> None:
        """Count what all ranks have found since the last call, in rank order; every rank calls this.

        Once per step and once per evaluation, where bad samples are tolerated.
        """
        if not self.tolerated:
            return
        new, self._new = self._new, []
        by_rank = [new] if self._all_gather is None else self._all_gather(new)
        seen = {(sample.split, sample.index) for sample in self._found}
        for sample in (sample for samples in by_rank for sample in samples):
            if (sample.split, sample.index) not in seen:
                seen.add((sample.split, sample.index))
                self._count(sample)

    def _count(self, sample: BadSample) -> None:
        self._keep(sample)
        self._log(sample)
        if len(self._found) > self._limit:
            last = self._found[-_NUM_SHOWN:]
            raise DataError(
                f"{len(self._found):,} images cannot be read, and data.bad_images tolerates {self._limit:,}",
                where=", ".join(shown.path for shown in last),
                why=f"the last of them: {sample.why}",
                hint="reconv data check PATH lists them all; repair or remove them, "
                f"or --set 'data.bad_images=skip up to {10 * self._limit}'",
            )

    def state(self, steps_done: int) -> list[dict[str, Any]]:
        """The state for a checkpoint: samples met before its step, whatever was prefetched."""
        return [asdict(sample) for sample in self._found if sample.split == "val" or sample.step < steps_done]

    def restore(self, state: Sequence[dict[str, Any]]) -> None:
        """Load the state of a checkpoint; nothing is logged again."""
        for saved in state:
            self._keep(BadSample(**saved))

    def _keep(self, sample: BadSample) -> None:
        self._found.append(sample)
        self._known[sample.split].add(sample.index)


def replacements(seed: int, epoch: int, index: int, num_samples: int) -> Iterator[int]:
    """Every sample once, in an order of its own for each (seed, epoch, index): the first good one is the replacement.

    A stride through the whole dataset rather than the neighbors, which in a sorted folder have the same class and
    may be bad for the same reason.
    """
    base = key(seed, "stand-in", epoch, index)  # the stream's name decides the bits
    start, stride = (int(value) % num_samples for value in hash_array(base, np.arange(2)))
    while math.gcd(stride, num_samples) != 1:
        stride += 1
    return ((start + step * stride) % num_samples for step in range(num_samples))
