"""Batches for the engine: the training stream by step, and evaluation by position.

Owns assembly, worker threads and reading ahead. Refuses to know formats, losses and the loop. Invariant: the bytes
of a step are a function of recipe, data and step alone; workers, ranks and the first step change nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import takewhile
from typing import TypeVar

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.data.augment import (
    ERASED,
    JITTERED,
    alternate_flips,
    draw_erased,
    draw_flips,
    draw_host,
    draw_jitter,
    effective,
)
from reconv.data.decode import train_preprocess
from reconv.data.faults import Faults, stand_ins
from reconv.data.fetch import Draws, Fetch, MakeFetch, Rows, make_fetch
from reconv.data.mix import draw_mix
from reconv.data.order import Order
from reconv.data.resident import Resident
from reconv.data.source import I64, LabelError, Source
from reconv.data.sources.synthetic import SyntheticOnDevice
from reconv.errors import DataError
from reconv.recipe.images import Preprocess
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe

Move = Callable[[Tensor], Tensor]
T = TypeVar("T")
R = TypeVar("R")

_EVAL_AHEAD = 2  # batches
_STEPS_MOVED = 16  # whose draws travel at once when images stay on the device


@dataclass(slots=True)
class _Pending:
    """Rows being filled by workers."""

    step: int
    positions: I64
    indices: I64
    rows: Rows
    fetch: Fetch
    draws: Draws | None
    tasks: list[tuple[slice, Callable[[], None]]]  # rows, and what waits until they are filled

    def wait(self) -> None:
        """Wait for every row; the first error in row order, if there was one."""
        for _, filled in self.tasks:
            filled()

    def wait_for_good(self, known: Collection[int]) -> dict[int, DataError | None]:
        """Wait for every row; the rows that are bad, now (with the error) or known to be from before, in order."""
        bad: dict[int, DataError | None] = {}
        for rows, filled in self.tasks:
            try:
                filled()
            except LabelError:
                raise
            except DataError:
                for row in range(*rows.indices(len(self.indices))):
                    if (error := self.fill(row)) is not None:
                        bad[row] = error
        for row, index in enumerate(self.indices.tolist()) if known else ():
            if index in known:
                bad.setdefault(row, None)
        return dict(sorted(bad.items()))

    def fill(self, row: int) -> DataError | None:
        """Fill one row at once, or say why it cannot be."""
        rows = slice(row, row + 1)
        draws = None if self.draws is None else self.draws[rows]
        try:
            self.fetch(self.indices[rows], draws, _cut_rows(self.rows, rows))
        except LabelError:
            raise
        except DataError as error:
            return error
        return None

    def tensors(self) -> dict[str, Tensor]:
        """The filled rows."""
        return {name: torch.from_numpy(array) for name, array in (*self.rows.items(), ("indices", self.indices))}

    def drop(self, rows: Collection[int]) -> None:
        """Go on without some rows, once all are filled."""
        if rows:
            kept = np.setdiff1d(np.arange(len(self.indices)), list(rows))
            self.positions, self.indices = self.positions[kept], self.indices[kept]
            self.rows = {name: array[kept] for name, array in self.rows.items()}


def _cut_rows(rows: Rows, some: slice) -> Rows:
    return {name: array[some] for name, array in rows.items()}


class _Filler:
    """Starts filling rows, in worker threads, or leaves it to who waits."""

    def __init__(self, pool: ThreadPoolExecutor | None) -> None:
        self._pool = pool

    def start(self, fetch: Fetch, step: int, positions: I64, indices: I64, draws: Draws | None = None) -> _Pending:
        """Fresh buffers for what the fetch fills, and the tasks that do it."""
        num_rows = len(indices)
        buffers = {column.name: column.empty(num_rows) for column in fetch.columns}
        tasks: list[tuple[slice, Callable[[], None]]] = []
        rows_per_task = fetch.rows_per_task or num_rows
        for start in range(0, num_rows, rows_per_task):
            rows = slice(start, start + rows_per_task)
            piece = None if draws is None else draws[rows]
            fill = partial(fetch, indices[rows], piece, _cut_rows(buffers, rows))
            # Without workers nothing is read ahead: rows are filled when they are waited for.
            tasks.append((rows, fill if self._pool is None else self._pool.submit(fill).result))
        return _Pending(step, positions, indices, buffers, fetch, draws, tasks)


@contextmanager
def _workers(num_workers: int) -> Iterator[ThreadPoolExecutor | None]:
    """Worker threads that are gone when the block ends; none for 0."""
    if num_workers == 0:
        yield None
        return
    pool = ThreadPoolExecutor(num_workers, thread_name_prefix="reconv-data")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def _read_ahead(items: Iterable[T], start: Callable[[T], R], num_ahead: int) -> Iterator[R]:
    """`start(item)` of each item in order, with up to `num_ahead` later ones already started."""
    started: deque[R] = deque()
    for item in items:
        started.append(start(item))
        if len(started) > num_ahead:
            yield started.popleft()
    yield from started


class TrainLoader:
    """The training stream of one rank: every step's micro-batches, from any step on."""

    def __init__(
        self,
        source: Source,
        recipe: Recipe,
        plan: Plan,
        move: Move,
        rank: int = 0,
        faults: Faults | None = None,
        make: MakeFetch = make_fetch,
    ) -> None:
        self._source = source
        self._faults = faults or Faults()
        self._recipe = recipe
        self._augment = effective(recipe.augment)
        self._plan = plan
        self._move = move
        self._make = make
        self._order = Order(len(source), plan.global_batch, recipe.data.tail, recipe.seed)
        self._micro_batches = plan.micro_batches(rank)
        first = rank * plan.batch_per_device
        self._rows = slice(first, first + plan.batch_per_device)  # of the global batch
        # Reading ahead may reach into the next size.
        self._fetch_of_size = lru_cache(maxsize=2)(self._make_fetch)
        self._resident_of_size = lru_cache(maxsize=1)(self._make_resident)

    def _make_fetch(self, size: int) -> Fetch:
        preprocess = train_preprocess(self._recipe.data.preprocess, self._augment, size)
        return self._make(self._source, preprocess, self._augment)

    def _make_resident(self, size: int) -> Resident:
        preprocess = train_preprocess(self._recipe.data.preprocess, self._augment, size)
        return Resident(self._source, preprocess, self._augment, self._move)

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        """This rank's micro-batches of each step in [start, stop), on the device."""
        if self._source.kind == SyntheticOnDevice.kind:
            return self._repeated_steps(start, stop)
        if self._recipe.data.resident == "device":
            return self._resident_steps(start, stop)
        return self._loaded_steps(start, stop)

    def _loaded_steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        num_workers = self._plan.workers
        with _workers(num_workers) as pool:
            filler = _Filler(pool)
            num_ahead = self._recipe.data.prefetch if num_workers else 0
            for pending in _read_ahead(range(start, stop), lambda step: self._begin(filler, step), num_ahead):
                yield self._finish(pending)

    def _resident_steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        """Images that lie on the device are cropped there; what was drawn travels for some steps of one size at once.

        A step of small images is as short as the host can launch it: draws and copies step by step took a fifth of it.
        """
        while start < stop:
            steps = self._steps_of_one_size(range(start, min(start + _STEPS_MOVED, stop)))
            yield from self._cropped_on_device(steps)
            start += len(steps)

    def _steps_of_one_size(self, steps: Sequence[int]) -> list[int]:
        """The first of the steps, up to a change of the image size."""
        size = self._plan.size_at(steps[0])
        return list(takewhile(lambda step: self._plan.size_at(step) == size, steps))

    def _cropped_on_device(self, steps: Sequence[int]) -> Iterator[tuple[Batch, ...]]:
        size = self._plan.size_at(steps[0])
        resident = self._resident_of_size(size)
        positions = np.concatenate([self._order.positions(step)[self._rows] for step in steps])
        indices = self._order.indices_of(positions)
        draws = draw_host(self._augment, self._recipe.seed, positions)
        tensors = resident.drawn(indices, draws) | self._drawn(positions, indices, size)
        moved = Batch(tensors, torch.from_numpy(positions), (len(positions),)).map(self._move)
        num_rows = len(positions) // len(steps)
        for number, step in enumerate(steps):
            rows = slice(number * num_rows, (number + 1) * num_rows)
            batch = Batch({name: t[rows] for name, t in moved.tensors.items()}, moved.positions[rows], (num_rows,))
            yield tuple(resident.crop(piece) for piece in self._cut(step, positions[rows], batch, size))

    def _repeated_steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        """The first step's batches stay on the device and are repeated under each step's positions."""
        filler, size = _Filler(None), 0
        first: tuple[Batch, ...] = ()
        for step in range(start, stop):
            if self._plan.size_at(step) != size:
                size = self._plan.size_at(step)
                first = self._finish(self._begin(filler, 0, size))
            shift = step * self._plan.global_batch
            yield tuple(Batch(batch.tensors, batch.positions + shift, batch.groups) for batch in first)

    def _begin(self, filler: _Filler, step: int, size: int | None = None) -> _Pending:
        size = size or self._plan.size_at(step)
        positions = self._order.positions(step)[self._rows]
        fetch = self._fetch_of_size(size)
        draws = fetch.draw(self._recipe.seed, positions)
        return filler.start(fetch, step, positions, self._order.indices_of(positions), draws)

    def _finish(self, pending: _Pending) -> tuple[Batch, ...]:
        positions, size = pending.positions, pending.rows["images"].shape[-1]
        if self._faults.borne:
            self._replace_bad(pending)
        else:
            pending.wait()
        tensors = pending.tensors() | self._drawn(positions, pending.indices, size)
        batch = Batch(tensors, torch.from_numpy(positions), (len(positions),))
        return self._cut(pending.step, positions, batch, size)

    def _replace_bad(self, pending: _Pending) -> None:
        """Put a good sample in the place of each bad one, its draws those of the position.

        Here, where steps come in order and after them alone a save may follow, so that what is known to be bad depends
        on the step and not on what was read ahead.
        """
        bad = pending.wait_for_good(self._faults.known("train"))
        for row, error in bad.items():
            index, epoch = int(pending.indices[row]), int(self._order.epoch_of(pending.positions[row : row + 1])[0])
            if error is not None:
                self._faults.add("train", index, pending.step, error)
            for other in stand_ins(self._recipe.seed, epoch, index, len(self._source)):
                if other in self._faults.known("train"):
                    continue
                pending.indices[row] = other
                if (error := pending.fill(row)) is None:
                    break
                self._faults.add("train", other, pending.step, error)
            else:
                raise DataError("no training image can be read", where=self._source.origin)

    def _drawn(self, positions: I64, indices: I64, size: int) -> dict[str, Tensor]:
        """What is drawn for each row alone and done on the device."""
        augment, seed = self._augment, self._recipe.seed
        drawn = {"flips": torch.from_numpy(self._flips(positions, indices))}
        if augment.jitter.on and augment.jitter.form == "tensorflow":
            drawn[JITTERED] = torch.from_numpy(draw_jitter(augment, seed, positions))
        if augment.erase.probability > 0:
            drawn[ERASED] = torch.from_numpy(draw_erased(augment.erase, seed, positions, size))
        return drawn

    def _cut(self, step: int, positions: I64, batch: Batch, size: int) -> tuple[Batch, ...]:
        """This rank's micro-batches on the device, with what is drawn for their groups; `positions` are the batch's."""
        batches = []
        start = 0
        for groups in self._micro_batches:
            rows = slice(start, start + sum(groups))
            piece = {name: tensor[rows] for name, tensor in batch.tensors.items()}
            drawn = draw_mix(self._augment, self._recipe.seed, step, positions[rows], groups, size)
            piece |= {name: torch.from_numpy(array) for name, array in drawn.items()}
            batches.append(Batch(piece, batch.positions[rows], groups).map(self._move))
            start = rows.stop
        return tuple(batches)

    def _flips(self, positions: I64, indices: I64) -> npt.NDArray[np.bool_]:
        if self._augment.flip_form == "random" or self._augment.flip == 0:
            return draw_flips(self._augment, self._recipe.seed, positions)
        return alternate_flips(self._augment, self._recipe.seed, indices, self._order.epoch_of(positions))


class EvalLoader:
    """Every sample exactly once: batches fixed by position and dealt whole to ranks, the last one may be short."""

    def __init__(
        self,
        source: Source,
        preprocess: Preprocess,
        batch: int,
        move: Move,
        workers: int,
        rank: int = 0,
        world: int = 1,
        faults: Faults | None = None,
        make: MakeFetch = make_fetch,
    ) -> None:
        self._faults = faults or Faults()
        self._num_samples = len(source)
        self._batch = batch
        self._move = move
        self._num_workers = workers
        num_batches = -(-len(source) // batch)
        self._numbers = range(rank, num_batches, world)
        self._fetch = make(source, preprocess, None)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        return self.after(0)

    def after(self, steps_done: int) -> Iterator[Batch]:
        """The batches as they are when so many steps are done; bad images are left out, where that is borne."""
        with _workers(self._num_workers) as pool:
            filler = _Filler(pool)
            num_ahead = _EVAL_AHEAD if self._num_workers else 0
            for pending in _read_ahead(self._numbers, lambda number: self._begin(filler, number), num_ahead):
                self._wait(pending, steps_done)
                if len(pending.positions):
                    positions = torch.from_numpy(pending.positions)
                    yield Batch(pending.tensors(), positions, (len(positions),)).map(self._move)

    def _begin(self, filler: _Filler, number: int) -> _Pending:
        stop = min((number + 1) * self._batch, self._num_samples)
        positions = np.arange(number * self._batch, stop, dtype=np.int64)
        return filler.start(self._fetch, number, positions, positions)

    def _wait(self, pending: _Pending, steps_done: int) -> None:
        """Wait for the rows, without those of bad images where they are borne."""
        if not self._faults.borne:
            pending.wait()
            return
        bad = pending.wait_for_good(self._faults.known("val"))
        for row, error in bad.items():
            if error is not None:
                self._faults.add("val", int(pending.indices[row]), steps_done, error)
        pending.drop(bad)
