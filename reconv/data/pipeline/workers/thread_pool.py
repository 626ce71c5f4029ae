"""Workers that fill rows: the protocol, the calling thread, and threads; processes are in `process_pool`.

Rows are the same whichever worker fills them, an error is raised where its rows are waited for, and nothing that was
started outlives `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from reconv.data.dataset import I64, Dataset, NamedArrays, select_rows
from reconv.data.pipeline.buffers import Buffer, BufferView, private_buffer
from reconv.data.pipeline.samples import SamplePipeline
from reconv.data.stage_timing import Seconds, timed

Wait = Callable[[], Seconds]  # waits until rows are filled; where the time went


@dataclass(frozen=True, slots=True)
class FillTask:
    """Some rows of a batch to be filled."""

    pipeline: SamplePipeline
    indices: I64
    params: NamedArrays
    view: BufferView
    rows: slice

    def run(self) -> Seconds:
        """Fill the rows in this thread."""
        return timed(lambda: self.pipeline(self.indices, self.params, select_rows(self.view.rows, self.rows)))


class Workers(Protocol):
    """Fill rows, several tasks at a time."""

    num_workers: int  # 0: the calling thread, when it waits

    def share(self, dataset: Dataset) -> None:
        """Make a dataset known to all workers."""
        ...

    def allocate(self, num_bytes: int) -> Buffer:
        """Memory that all workers can fill."""
        ...

    def start(self, task: FillTask) -> Wait: ...
    def close(self) -> None:
        """Cancel tasks that have not begun and wait for the others."""
        ...


class InlineWorker:
    """No workers: rows are filled by the thread that waits for them."""

    num_workers = 0

    def share(self, dataset: Dataset) -> None:
        pass

    def allocate(self, num_bytes: int) -> Buffer:
        return private_buffer(num_bytes)

    def start(self, task: FillTask) -> Wait:
        return task.run

    def close(self) -> None:
        pass


class ThreadPool:
    """Worker threads; decoders release the GIL while they work."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reconv-data")

    def share(self, dataset: Dataset) -> None:
        pass

    def allocate(self, num_bytes: int) -> Buffer:
        return private_buffer(num_bytes)

    def start(self, task: FillTask) -> Wait:
        return self._pool.submit(task.run).result

    def close(self) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)


def open_workers(backend: str, num_workers: int) -> Workers:
    """Workers of a plan's backend."""
    if num_workers == 0 or backend == "caller":
        return InlineWorker()
    if backend == "processes":
        from reconv.data.pipeline.workers.process_pool import ProcessPool

        return ProcessPool(num_workers)
    return ThreadPool(num_workers)
