"""Batches for the engine: the training stream by step, and evaluation by position.

Owns assembly: which samples, with which draws, cut into which micro-batches. Refuses to know formats, losses, the loop,
who fills rows and how they reach the device. Invariant: the bytes of a step are a function of recipe, data and step
alone; workers, ranks and the first step change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import lru_cache, partial
from itertools import takewhile

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.data.dataset import I64, Dataset
from reconv.data.decode.decode import train_preprocess
from reconv.data.pipeline.bad_samples import BadSamples, replacements
from reconv.data.pipeline.buffers import HostToDevice, Moving
from reconv.data.pipeline.gpu_decode import HANDED, HandOver, keep_here
from reconv.data.pipeline.gpu_decoder import GpuDecoder
from reconv.data.pipeline.prefetcher import Pending, Prefetcher
from reconv.data.pipeline.preloaded import PreloadedImages
from reconv.data.pipeline.sample_pipeline import MakeSamplePipeline, SamplePipeline, make_sample_pipeline
from reconv.data.pipeline.stage_timing import StageTimes
from reconv.data.pipeline.thread_pool import InlineWorker, Workers, open_workers
from reconv.data.readers.synthetic import SyntheticDeviceDataset
from reconv.data.sampler import Sampler
from reconv.data.transforms.mixup import draw_mix
from reconv.data.transforms.random_params import (
    ERASED,
    JITTERED,
    alternate_flips,
    draw_erased,
    draw_flips,
    draw_host,
    draw_jitter,
    effective,
)
from reconv.errors import DataError
from reconv.recipe.data_fields import PreprocessConfig
from reconv.recipe.plan import EVAL_AHEAD, Plan
from reconv.recipe.schema import Recipe

Move = Callable[[Tensor], Tensor]

_STEPS_MOVED = 16  # whose draws travel at once when images stay on the device


@contextmanager
def _filling(
    shared: Workers | None,
    make: Callable[[], Workers],
    source: Dataset,
    carrier: HostToDevice,
    ahead: int,
    stages: StageTimes,
) -> Iterator[Prefetcher]:
    """A stream's filler, with workers of its own unless it was given some that others use too."""
    workers = shared or make()
    workers.share(source)
    filler = Prefetcher(workers, carrier, ahead, stages)
    try:
        yield filler
    finally:
        if shared is None:
            workers.close()
        filler.ring.close()


class TrainLoader:
    """The training stream of one rank: every step's micro-batches, from any step on.

    With an `engine` the plan's share of rows is decoded by the device; without one, all by the host.
    """

    def __init__(
        self,
        source: Dataset,
        recipe: Recipe,
        plan: Plan,
        move: Move,
        rank: int = 0,
        faults: BadSamples | None = None,
        make: MakeSamplePipeline = make_sample_pipeline,
        shared: Workers | None = None,
        carrier: HostToDevice | None = None,
        stages: StageTimes | None = None,
        engine: GpuDecoder | None = None,
    ) -> None:
        self._source = source
        self._workers = shared
        self._carrier = carrier or Moving(move)
        self._stages = stages or StageTimes()
        self._engine = engine
        self._faults = faults or BadSamples()
        self._recipe = recipe
        self._augment = effective(recipe.augment).model_copy(update={"decoder": plan.decoder})
        self._plan = plan
        self._move = move
        self._make = make
        self._order = Sampler(len(source), plan.global_batch, recipe.data.drop_last, recipe.seed)
        self._micro_batches = plan.micro_batches(rank)
        self._rows = plan.rows(rank)  # of the global batch
        # Reading ahead may reach into the next size.
        self._fetch_of_size = lru_cache(maxsize=2)(self._make_fetch)
        self._resident_of_size = lru_cache(maxsize=1)(self._make_resident)

    def _make_fetch(self, size: int) -> SamplePipeline:
        preprocess = train_preprocess(self._recipe.data.preprocess, self._augment, size)
        if self._engine is not None:
            return HandOver(self._source, preprocess, self._augment, self._plan.gpu_share)
        return self._make(self._source, preprocess, self._augment)

    def _make_resident(self, size: int) -> PreloadedImages:
        preprocess = train_preprocess(self._recipe.data.preprocess, self._augment, size)
        return PreloadedImages(self._source, preprocess, self._augment, self._move)

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        """This rank's micro-batches of each step in [start, stop), on the device."""
        if self._source.kind == SyntheticDeviceDataset.kind:
            return self._repeated_steps(start, stop)
        if self._recipe.data.preload == "device":
            return self._resident_steps(start, stop)
        return self._loaded_steps(start, stop)

    def _loaded_steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        make = partial(open_workers, self._plan.backend, self._plan.workers)
        with self._filler(self._workers, make) as filler:
            for pending in filler.stream(range(start, stop), lambda step: self._begin(filler, step)):
                yield self._finish(filler, pending)

    def _filler(self, shared: Workers | None, make: Callable[[], Workers]) -> AbstractContextManager[Prefetcher]:
        return _filling(shared, make, self._source, self._carrier, self._recipe.data.prefetch, self._stages)

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
            split_into_shards = self._cut(step, positions[rows], batch, size)
            yield tuple(resident.crop(piece.map(self._move)) for piece in split_into_shards)

    def _repeated_steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        """The first step's batches stay on the device and are repeated under each step's positions."""
        first: tuple[Batch, ...] = ()
        size = 0
        with self._filler(None, InlineWorker) as filler:
            for step in range(start, stop):
                if self._plan.size_at(step) != size:
                    size = self._plan.size_at(step)
                    first = self._finish(filler, self._begin(filler, 0, size))
                shift = step * self._plan.global_batch
                yield tuple(Batch(batch.tensors, batch.positions + shift, batch.groups) for batch in first)

    def _begin(self, filler: Prefetcher, step: int, size: int | None = None) -> Pending:
        size = size or self._plan.size_at(step)
        positions = self._order.positions(step)[self._rows]
        fetch = self._fetch_of_size(size)
        draws = fetch.draw(self._recipe.seed, positions)
        indices = self._order.indices_of(positions)
        pending = filler.start(fetch, step, positions, indices, self._plan.batch_per_device, draws)
        if self._engine is not None and isinstance(fetch, HandOver):
            self._engine.start(pending, fetch.form)
        return pending

    def _finish(self, filler: Prefetcher, pending: Pending) -> tuple[Batch, ...]:
        positions, size = pending.positions, pending.rows["images"].shape[-1]
        if self._engine is not None:
            self._engine.settle(pending)
        if self._faults.borne:
            self._replace_bad(pending)
        else:
            pending.wait()
        tensors = pending.tensors() | self._drawn(positions, pending.indices, size)
        tensors.pop(HANDED, None)  # between host and engine
        batch = Batch(tensors, torch.from_numpy(positions), (len(positions),))
        began_s = time.perf_counter()
        sent = [self._carrier.send(piece) for piece in self._cut(pending.step, positions, batch, size)]
        for _, copied in sent:
            filler.ring.sent(pending.rows, copied)
        self._stages.add({"copy": time.perf_counter() - began_s})
        split_into_shards = tuple(piece for piece, _ in sent)
        if self._engine is not None:
            first = 0
            for piece in split_into_shards:
                self._engine.place(pending, piece["images"], first)
                first += len(piece)
        return split_into_shards

    def _replace_bad(self, pending: Pending) -> None:
        """Put a good sample in the place of each bad one, its draws those of the position.

        Here, where steps come in order and after them alone a save may follow, so that what is known to be bad depends
        on the step and not on what was read ahead.
        """
        bad = pending.wait_for_good(self._faults.known("train"))
        for row, error in bad.items():
            index, epoch = int(pending.indices[row]), int(self._order.epoch_of(pending.positions[row : row + 1])[0])
            if error is not None:
                self._faults.add("train", index, pending.step, error)
            if self._engine is not None and pending.draws is not None:
                keep_here(pending.draws, row)  # whoever was to make the bad one
            for other in replacements(self._recipe.seed, epoch, index, len(self._source)):
                if other in self._faults.known("train"):
                    continue
                pending.indices[row] = other
                if (error := pending.fill(row)) is None:
                    break
                self._faults.add("train", other, pending.step, error)
            else:
                raise DataError("no training image can be read", where=self._source.origin)
        self._faults.settle()

    def _drawn(self, positions: I64, indices: I64, size: int) -> dict[str, Tensor]:
        """What is drawn for each row alone and done on the device."""
        augment, seed = self._augment, self._recipe.seed
        drawn = {"flips": torch.from_numpy(self._flips(positions, indices))}
        if augment.color_jitter.on and augment.color_jitter.implementation == "tensorflow":
            drawn[JITTERED] = torch.from_numpy(draw_jitter(augment, seed, positions))
        if augment.random_erasing.probability > 0:
            drawn[ERASED] = torch.from_numpy(draw_erased(augment.random_erasing, seed, positions, size))
        return drawn

    def _cut(self, step: int, positions: I64, batch: Batch, size: int) -> tuple[Batch, ...]:
        """This rank's micro-batches, with what is drawn for their groups; `positions` are the batch's."""
        batches = []
        start = 0
        for groups in self._micro_batches:
            rows = slice(start, start + sum(groups))
            piece = {name: tensor[rows] for name, tensor in batch.tensors.items()}
            drawn = draw_mix(self._augment, self._recipe.seed, step, positions[rows], groups, size)
            piece |= {name: torch.from_numpy(array) for name, array in drawn.items()}
            batches.append(Batch(piece, batch.positions[rows], groups))
            start = rows.stop
        return tuple(batches)

    def _flips(self, positions: I64, indices: I64) -> npt.NDArray[np.bool_]:
        if self._augment.hflip_mode == "random" or self._augment.hflip == 0:
            return draw_flips(self._augment, self._recipe.seed, positions)
        return alternate_flips(self._augment, self._recipe.seed, indices, self._order.epoch_of(positions))


class EvalLoader:
    """Every sample exactly once: batches fixed by position and dealt whole to ranks, the last one may be short."""

    def __init__(
        self,
        source: Dataset,
        preprocess: PreprocessConfig,
        batch: int,
        move: Move,
        workers: int,
        rank: int = 0,
        process_group: int = 1,
        faults: BadSamples | None = None,
        make: MakeSamplePipeline = make_sample_pipeline,
        shared: Workers | None = None,
        carrier: HostToDevice | None = None,
        stages: StageTimes | None = None,
        engine: GpuDecoder | None = None,
    ) -> None:
        self._source = source
        self._workers = shared
        self._carrier = carrier or Moving(move)
        self._stages = stages or StageTimes()
        self._engine = engine
        self._faults = faults or BadSamples()
        self._num_samples = len(source)
        self._batch = batch
        self._num_workers = workers
        num_batches = -(-len(source) // batch)
        self._numbers = range(rank, num_batches, process_group)
        self._fetch = make(source, preprocess, None) if engine is None else HandOver(source, preprocess, None, 1.0)

    def __len__(self) -> int:
        return len(self._numbers)

    def __iter__(self) -> Iterator[Batch]:
        return self.after(0)

    def after(self, steps_done: int) -> Iterator[Batch]:
        """The batches as they are when so many steps are done; bad images are left out, where that is borne."""
        make = partial(open_workers, "threads", self._num_workers)
        with _filling(self._workers, make, self._source, self._carrier, EVAL_AHEAD, self._stages) as filler:
            for pending in filler.stream(self._numbers, lambda number: self._begin(filler, number)):
                self._wait(pending, steps_done)
                if len(pending.positions):
                    positions, tensors = torch.from_numpy(pending.positions), pending.tensors()
                    tensors.pop(HANDED, None)
                    batch, copied = self._carrier.send(Batch(tensors, positions, (len(positions),)))
                    filler.ring.sent(pending.rows, copied)
                    if self._engine is not None:
                        self._engine.place(pending, batch["images"], 0)
                    yield batch
        if len(self._faults.known("val")) == self._num_samples:
            raise DataError(
                "no validation image can be read",
                where=self._source.origin,
                why=f"all {self._num_samples:,} are bad images; a score of nothing would look like a bad network's",
                then="reconv data check PATH tells what is wrong with each",
            )

    def _begin(self, filler: Prefetcher, number: int) -> Pending:
        stop = min((number + 1) * self._batch, self._num_samples)
        positions = np.arange(number * self._batch, stop, dtype=np.int64)
        if self._engine is None or not isinstance(self._fetch, HandOver):
            return filler.start(self._fetch, number, positions, positions, self._batch)
        draws = self._fetch.draw(0, positions)
        pending = filler.start(self._fetch, number, positions, positions, self._batch, draws)
        self._engine.start(pending, self._fetch.form)
        return pending

    def _wait(self, pending: Pending, steps_done: int) -> None:
        """Wait for the rows, without those of bad images where they are borne."""
        if self._engine is not None:
            self._engine.settle(pending)
        if not self._faults.borne:
            pending.wait()
            return
        bad = pending.wait_for_good(self._faults.known("val"))
        for row, error in bad.items():
            if error is not None:
                self._faults.add("val", int(pending.indices[row]), steps_done, error)
        pending.drop(bad)
