"""Who fills rows: the caller, threads, or processes (processes.py), behind one protocol.

Owns the protocol and the two that share this process's memory. Refuses to know order, steps and what rows hold.
Invariant: rows come out the same whoever fills them, an error is raised where rows are waited for, and nothing that
was started outlives `close`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

from reconv.data.dataset import I64, Dataset
from reconv.data.pipeline.buffers import Buffer, BufferView, ordinary_slab
from reconv.data.pipeline.sample_pipeline import Draws, Rows, SamplePipeline
from reconv.data.pipeline.stage_timing import Seconds, timed

Wait = Callable[[], Seconds]  # waits until rows are filled; where the time went


@dataclass(frozen=True, slots=True)
class FillTask:
    """Some rows of a batch to be filled."""

    fetch: SamplePipeline
    indices: I64
    draws: Draws | None
    lease: BufferView
    rows: slice

    def run(self) -> Seconds:
        """Fill the rows here and now."""
        return timed(lambda: self.fetch(self.indices, self.draws, cut_rows(self.lease.rows, self.rows)))


def cut_rows(rows: Rows, some: slice) -> Rows:
    """The same rows of every column."""
    return {name: array[some] for name, array in rows.items()}


class Workers(Protocol):
    """Who fills rows."""

    num_workers: int  # 0: the caller, when it waits

    def share(self, source: Dataset) -> None:
        """Samples will be read from this source."""
        ...

    def slab(self, num_bytes: int) -> Buffer:
        """Memory that can be filled."""
        ...

    def start(self, task: FillTask) -> Wait: ...
    def close(self) -> None: ...


class InlineWorker:
    """No workers: rows are filled by whoever waits for them."""

    num_workers = 0

    def share(self, source: Dataset) -> None:
        """It is here already."""

    def slab(self, num_bytes: int) -> Buffer:
        """Memory of this process."""
        return ordinary_slab(num_bytes)

    def start(self, task: FillTask) -> Wait:
        """Nothing is begun before it is waited for."""
        return task.run

    def close(self) -> None:
        """Nothing was started."""


class ThreadPool:
    """Worker threads; decoders let go of the GIL while they work."""

    def __init__(self, num_workers: int) -> None:
        self.num_workers = num_workers
        self._pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reconv-data")

    def share(self, source: Dataset) -> None:
        """ThreadPool see everything."""

    def slab(self, num_bytes: int) -> Buffer:
        """Memory of this process."""
        return ordinary_slab(num_bytes)

    def start(self, task: FillTask) -> Wait:
        """Begin to fill the rows as soon as a thread is free."""
        return self._pool.submit(task.run).result

    def close(self) -> None:
        """Forget what was not begun and wait for the rest."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def open_workers(backend: str, num_workers: int) -> Workers:
    """Workers of the kind a plan names: caller, threads or processes, which make the host's rows beside a GPU's."""
    if num_workers == 0 or backend == "caller":
        return InlineWorker()
    if backend in ("processes", "gpu"):
        from reconv.data.pipeline.process_pool import ProcessPool

        return ProcessPool(num_workers)
    return ThreadPool(num_workers)
