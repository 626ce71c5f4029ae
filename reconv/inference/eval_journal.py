"""The finished batches of an evaluation, kept in a journal so that the same command continues after a kill.

Metrics do not depend on how the batches were split, so what is kept are the states of metrics over some batches each. A
batch with images that could not be read is not kept: it is evaluated, and its images are named, again.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np

from reconv.core.batch import Batch
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.distributed.process_group import ProcessGroup
from reconv.metrics.state import MetricsState, decode_state, encode_state
from reconv.storage import read_limits
from reconv.storage.work_journal import WorkJournal
from reconv.tasks.base import Metrics

KEEP_EVERY_S = 5.0  # what a kill may cost; reading the metrics of a device delays it
_MAX_IMAGES = 4096  # of a part
_BATCHES = "batches"  # the array of a part that has the numbers of its batches


def _read_finished(journal: WorkJournal, states: list[MetricsState]) -> set[int]:
    """The numbers of the batches that an earlier start has finished; the states of their metrics are appended."""
    finished: set[int] = set()
    for content in map(journal.read, journal.parts()):
        if content is None:
            continue
        state = decode_state(content)
        numbers = set(state.pop(_BATCHES).tolist())
        if finished.isdisjoint(numbers):
            finished |= numbers
            states.append(state)
    return finished


class JournaledMetrics:
    """The metrics of the batches of a loader; from time to time those of whole batches go to the journal."""

    def __init__(
        self,
        make_metrics: Callable[[], Metrics],
        loader: EvalLoader,
        journal: WorkJournal | None,
        earlier: Sequence[MetricsState] = (),
        was_continued: bool = False,
    ) -> None:
        self.loader = loader
        self.metrics = make_metrics()  # of the batches that are not kept
        self.kept = list(earlier)
        self.was_continued = was_continued
        self._make_metrics = make_metrics
        self._journal = journal
        self._start_part()

    @classmethod
    def open(
        cls,
        make_metrics: Callable[[], Metrics],
        open_loader: Callable[[Collection[int]], EvalLoader],
        journal: WorkJournal | None,
        process_group: ProcessGroup,
    ) -> JournaledMetrics:
        """Continue with the batches that the journal does not have; rank 0 gets the states of the others."""
        earlier: list[MetricsState] = []

        def read() -> set[int]:
            return set() if journal is None else _read_finished(journal, earlier)

        finished = process_group.on_rank0(read)
        return cls(make_metrics, open_loader(finished), journal, earlier, bool(finished))

    def _start_part(self) -> None:
        self._part, self._numbers, self._start_s = self._make_metrics(), list[int](), time.monotonic()

    def update(self, outputs: Any, batch: Batch) -> None:
        number = self.loader.whole_batch
        if self._journal is None or number is None:
            self.metrics.update(outputs, batch)
            return
        self._part.update(outputs, batch)
        self._numbers.append(number)
        if time.monotonic() - self._start_s >= KEEP_EVERY_S or self._part.num_samples >= _MAX_IMAGES:
            self.finish_part()

    def finish_part(self) -> None:
        """Keep the batches since the last part."""
        if self._journal is None or not self._numbers:
            return
        state = self._part.state()
        payload = encode_state({**state, _BATCHES: np.array(self._numbers, np.int64)})
        if len(payload) < read_limits.STATE_BYTES // 2:  # larger ones would not be read again
            self._journal.write(f"{self._numbers[0]:010}", payload)
        self.kept.append(state)
        self._start_part()
