"""Filling batches ahead of time: tasks for workers, batches being filled, and what to do with rows that fail.

Batches come out in the order they were started, and errors are raised where a batch is waited for.

Batches do not depend on the number or kind of the workers (tests/laws/test_law_resume.py: resume with other workers).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from reconv.core.errors import DataError
from reconv.data.dataset import I64, Dataset, LabelError, NamedArrays, select_rows
from reconv.data.pipeline.buffers import BlockingTransfer, BufferPool, HostToDevice
from reconv.data.pipeline.samples import SamplePipeline
from reconv.data.pipeline.workers.thread_pool import FillTask, Wait, Workers
from reconv.data.stage_timing import Seconds, StageTimes

T = TypeVar("T")
R = TypeVar("R")

_SMALL_ROW_BYTES = 8192
_MAX_ROWS_PER_TASK = 16  # the message for a task costs a worker as much as a fifth of an image


@dataclass(frozen=True, slots=True)
class DataContext:
    """Resources that the loaders of a run share; without `workers` each pass over a loader opens its own."""

    to_device: HostToDevice
    workers: Workers | None = None
    stage_times: StageTimes = field(default_factory=StageTimes)
    eval_workers: Workers | None = None  # None: `workers`

    @classmethod
    def on_host(cls) -> DataContext:
        """A context whose batches stay where they are filled."""
        return cls(BlockingTransfer(lambda tensor: tensor))


@dataclass(slots=True)
class PendingBatch:
    """A batch whose rows are being filled by workers."""

    step: int
    positions: I64
    indices: I64
    rows: NamedArrays
    pipeline: SamplePipeline
    params: NamedArrays
    tasks: list[tuple[slice, Wait]]  # rows, and a function that waits until they are filled
    stage_times: StageTimes

    def wait(self) -> None:
        """Wait for every row; raises the first error in row order."""
        for _, outcome in self.outcomes():
            if isinstance(outcome, DataError):
                raise outcome
            self.stage_times.add(outcome)

    def wait_for_bad_rows(self, known_bad: Collection[int]) -> dict[int, DataError | None]:
        """Wait for every row; those that failed with their error, those with an index known to be bad with None.

        In row order.
        """
        bad: dict[int, DataError | None] = {}
        for rows, outcome in self.outcomes():
            if isinstance(outcome, LabelError):
                raise outcome
            if isinstance(outcome, DataError):
                for row in range(*rows.indices(len(self.indices))):
                    if (error := self.fill(row)) is not None:
                        bad[row] = error
            else:
                self.stage_times.add(outcome)
        for row, index in enumerate(self.indices.tolist()) if known_bad else ():
            if index in known_bad:
                bad.setdefault(row, None)
        return dict(sorted(bad.items()))

    def outcomes(self) -> list[tuple[slice, Seconds | DataError]]:
        """The seconds or the error of every task, in row order.

        The task that was started last is waited for first: the others are done by then, or almost, so that this
        thread sleeps about once per batch. Each time it wakes it takes the GIL from the workers.
        """
        last = [_outcome(task) for task in self.tasks[-1:]]
        return [_outcome(task) for task in self.tasks[:-1]] + last

    def fill(self, row: int) -> DataError | None:
        """Fill one row in this thread; the error if that fails."""
        rows = slice(row, row + 1)
        try:
            self.pipeline(self.indices[rows], select_rows(self.params, rows), select_rows(self.rows, rows))
        except LabelError:
            raise
        except DataError as error:
            return error
        return None

    def tensors(self) -> dict[str, Tensor]:
        """The rows that go to the device, with `indices`.

        Small rows are copied, so that keeping a label does not keep a batch of images alive.
        """
        arrays = {column.name: self.rows[column.name] for column in self.pipeline.columns if column.to_device}
        arrays = {name: np.copy(rows) if _is_small(rows[:1]) else rows for name, rows in arrays.items()}
        return {name: torch.from_numpy(array) for name, array in (*arrays.items(), ("indices", self.indices))}

    def drop(self, rows: Collection[int]) -> None:
        """Drop some rows once all are filled."""
        if rows:
            kept = np.setdiff1d(np.arange(len(self.indices)), list(rows))
            self.positions, self.indices = self.positions[kept], self.indices[kept]
            self.rows = {name: array[kept] for name, array in self.rows.items()}


def _outcome(task: tuple[slice, Wait]) -> tuple[slice, Seconds | DataError]:
    rows, wait = task
    try:
        return rows, wait()
    except DataError as error:
        return rows, error


def _is_small(row: np.ndarray) -> bool:
    return row.nbytes <= _SMALL_ROW_BYTES


class Prefetcher:
    """Starts to fill batches, up to `ahead` of the one that is used."""

    def __init__(self, workers: Workers, to_device: HostToDevice, ahead: int, stage_times: StageTimes) -> None:
        self._workers = workers
        self._stage_times = stage_times
        # Without workers nothing is prefetched: rows are filled when they are waited for.
        self._ahead = ahead if workers.num_workers else 0
        # Those being filled, the one in use, and the one before it, which the device may still read.
        self.buffers = BufferPool(to_device, workers.allocate, self._ahead + 3)

    @classmethod
    @contextmanager
    def open(
        cls, dataset: Dataset, context: DataContext, open_own_workers: Callable[[], Workers], ahead: int
    ) -> Iterator[Prefetcher]:
        """A prefetcher with the context's workers; without them, with workers that are closed at the end."""
        workers = context.workers or open_own_workers()
        workers.share(dataset)
        prefetcher = cls(workers, context.to_device, ahead, context.stage_times)
        try:
            yield prefetcher
        finally:
            if context.workers is None:
                workers.close()
            prefetcher.buffers.close()

    def stream(self, items: Iterable[T], start: Callable[[T], R]) -> Iterator[R]:
        """`start(item)` of each item in order, called for later items before the earlier result is used."""
        started: deque[R] = deque()
        for item in items:
            started.append(start(item))
            if len(started) > self._ahead:
                yield started.popleft()
        while started:
            yield started.popleft()

    def start(
        self,
        pipeline: SamplePipeline,
        step: int,
        positions: I64,
        indices: I64,
        params: NamedArrays,
        max_rows: int,
    ) -> PendingBatch:
        """Start to fill a batch; its buffer is large enough for `max_rows`."""
        num_rows = len(indices)
        view = self.buffers.acquire(pipeline.columns, num_rows, max_rows)
        rows_per_task = _rows_per_task(pipeline.min_rows_per_task, num_rows, self._workers.num_workers)
        slices = [slice(start, min(start + rows_per_task, num_rows)) for start in range(0, num_rows, rows_per_task)]
        tasks = [
            (rows, self._workers.start(FillTask(pipeline, indices[rows], select_rows(params, rows), view, rows)))
            for rows in slices
        ]
        return PendingBatch(step, positions, indices, view.rows, pipeline, params, tasks, self._stage_times)


def _rows_per_task(min_rows: int | None, num_rows: int, num_workers: int) -> int:
    """Enough rows to give each worker a part of the batch, and not so many that the batch waits for one of them."""
    if min_rows is None:
        return num_rows
    return max(min_rows, min(_MAX_ROWS_PER_TASK, num_rows // max(1, num_workers)))
