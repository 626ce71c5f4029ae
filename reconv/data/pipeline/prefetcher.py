"""Batches on their way: rows being filled ahead of time, errors where they are waited for, memory used again.

Owns reading ahead and what happens to a row that cannot be filled. Refuses to know order, steps and who fills rows.
Invariant: rows are handed out in the order they were begun, each filled by its own index and draws.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeVar

import numpy as np
import torch
from torch import Tensor

from reconv.data.dataset import I64, LabelError
from reconv.data.pipeline.buffers import BufferPool, BufferView, HostToDevice
from reconv.data.pipeline.sample_pipeline import Draws, Rows, SamplePipeline
from reconv.data.pipeline.stage_timing import Seconds, StageTimes
from reconv.data.pipeline.thread_pool import FillTask, Wait, Workers, cut_rows
from reconv.errors import DataError

if TYPE_CHECKING:
    from reconv.data.pipeline.gpu_decoder import DeviceRows

T = TypeVar("T")
R = TypeVar("R")

_SMALL_ROW_BYTES = 8192
_MOST_ROWS = 16  # of a task: what is said of it to a worker costs as much as a fifth of an image


@dataclass(slots=True)
class Pending:
    """Rows being filled by workers."""

    step: int
    positions: I64
    indices: I64
    rows: Rows
    fetch: SamplePipeline
    draws: Draws | None
    tasks: list[tuple[slice, Wait]]  # rows, and what waits until they are filled
    stages: StageTimes
    device_rows: Future[DeviceRows] | None = None  # what a device makes of rows that are handed over to it
    kept: I64 | None = None  # the rows that are left, where some were dropped

    def wait(self) -> None:
        """Wait for every row; the first error in row order, if there was one."""
        for _, outcome in self.outcomes():
            if isinstance(outcome, DataError):
                raise outcome
            self.stages.add(outcome)

    def wait_for_good(self, known: Collection[int]) -> dict[int, DataError | None]:
        """Wait for every row; the rows that are bad, now (with the error) or known to be from before, in order."""
        bad: dict[int, DataError | None] = {}
        for rows, outcome in self.outcomes():
            if isinstance(outcome, LabelError):
                raise outcome
            if isinstance(outcome, DataError):
                for row in range(*rows.indices(len(self.indices))):
                    if (error := self.fill(row)) is not None:
                        bad[row] = error
            else:
                self.stages.add(outcome)
        for row, index in enumerate(self.indices.tolist()) if known else ():
            if index in known:
                bad.setdefault(row, None)
        return dict(sorted(bad.items()))

    def outcomes(self) -> list[tuple[slice, Seconds | DataError]]:
        """What came of every task, in row order.

        The one begun last is waited for first: the others are done by then, or almost, so the caller sleeps about once
        for a batch. Once for a task, its waking takes the GIL from the workers as often.
        """
        last = [_outcome(task) for task in self.tasks[-1:]]
        return [_outcome(task) for task in self.tasks[:-1]] + last

    def fill(self, row: int) -> DataError | None:
        """Fill one row at once, or say why it cannot be."""
        rows = slice(row, row + 1)
        draws = None if self.draws is None else self.draws[rows]
        try:
            self.fetch(self.indices[rows], draws, cut_rows(self.rows, rows))
        except LabelError:
            raise
        except DataError as error:
            return error
        return None

    def fill_again(self, row: int) -> None:
        """Have a row filled once more when the batch is waited for."""

        def fill() -> Seconds:
            if (error := self.fill(row)) is not None:
                raise error
            return {}

        self.tasks.append((slice(row, row + 1), fill))

    def tensors(self) -> dict[str, Tensor]:
        """The filled rows; small ones are copied, so that who keeps a label does not keep a batch of images."""
        arrays = {name: np.copy(array) if _is_small(array[:1]) else array for name, array in self.rows.items()}
        return {name: torch.from_numpy(array) for name, array in (*arrays.items(), ("indices", self.indices))}

    def drop(self, rows: Collection[int]) -> None:
        """Go on without some rows, once all are filled."""
        if rows:
            kept = np.setdiff1d(np.arange(len(self.indices)), list(rows))
            self.positions, self.indices = self.positions[kept], self.indices[kept]
            self.rows = {name: array[kept] for name, array in self.rows.items()}
            self.kept = kept

    def places_of(self, rows: I64) -> I64:
        """Where rows lie now; -1 for those that were dropped."""
        if self.kept is None:
            return rows
        places: I64 = np.where(np.isin(rows, self.kept), np.searchsorted(self.kept, rows), -1)
        return places


def _outcome(task: tuple[slice, Wait]) -> tuple[slice, Seconds | DataError]:
    rows, filled = task
    try:
        return rows, filled()
    except DataError as error:
        return rows, error


def _is_small(row: np.ndarray) -> bool:
    return row.nbytes <= _SMALL_ROW_BYTES


class Prefetcher:
    """Starts filling rows of a stream, up to so many batches ahead of the one handed out."""

    def __init__(self, workers: Workers, carrier: HostToDevice, ahead: int, stages: StageTimes) -> None:
        self._workers = workers
        self._stages = stages
        # Without workers nothing is read ahead: rows are filled when they are waited for.
        self._ahead = ahead if workers.num_workers else 0
        # Those being filled, the one handed out and the one before it, which the engine may still look at.
        self.ring = BufferPool(carrier, workers.slab, self._ahead + 3)

    def stream(self, items: Iterable[T], begin: Callable[[T], R]) -> Iterator[R]:
        """`begin(item)` of each item in order, with later ones already begun."""
        started: deque[R] = deque()
        for item in items:
            started.append(begin(item))
            if len(started) > self._ahead:
                yield started.popleft()
        while started:
            yield started.popleft()

    def start(
        self, fetch: SamplePipeline, step: int, positions: I64, indices: I64, most_rows: int, draws: Draws | None = None
    ) -> Pending:
        """Rows for what the fetch fills, and the tasks that do it."""
        num_rows = len(indices)
        lease = self.ring.take(fetch.columns, num_rows, most_rows)
        rows_per_task = _rows_per_task(fetch.rows_per_task, num_rows, self._workers.num_workers)
        cuts = [slice(start, min(start + rows_per_task, num_rows)) for start in range(0, num_rows, rows_per_task)]
        tasks = [(rows, self._workers.start(_task(fetch, indices, draws, lease, rows))) for rows in cuts]
        return Pending(step, positions, indices, lease.rows, fetch, draws, tasks, self._stages)


def _rows_per_task(fewest: int | None, num_rows: int, num_workers: int) -> int:
    """As many rows as give each worker something of a batch, and no more than a batch should wait for."""
    if fewest is None:
        return num_rows
    return max(fewest, min(_MOST_ROWS, num_rows // max(1, num_workers)))


def _task(fetch: SamplePipeline, indices: I64, draws: Draws | None, lease: BufferView, rows: slice) -> FillTask:
    return FillTask(fetch, indices[rows], None if draws is None else draws[rows], lease, rows)
