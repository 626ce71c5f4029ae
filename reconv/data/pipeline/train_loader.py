"""Loaders of training batches: streamed from a dataset, preloaded to the device (`preloaded`), or one batch repeated.

The bytes of a step are a function of recipe, data and step; workers, ranks and the first step change nothing.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Protocol

import torch

from reconv.core.batch import Batch, CopyEvent
from reconv.core.errors import DataError
from reconv.data.dataset import I64, Dataset
from reconv.data.pipeline.bad_samples import BadSamples, replacements
from reconv.data.pipeline.batch_assembler import BatchAssembler
from reconv.data.pipeline.prefetcher import DataContext, PendingBatch, Prefetcher
from reconv.data.pipeline.preloaded import PreloadedLoader
from reconv.data.pipeline.read_ahead import read_ahead
from reconv.data.pipeline.samples import MakeSamplePipeline, SamplePipeline, make_sample_pipeline
from reconv.data.pipeline.workers.thread_pool import InlineWorker, open_workers
from reconv.data.readers.synthetic import SyntheticDeviceDataset
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe


class TrainLoader(Protocol):
    """The training batches of one rank, from any step on."""

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        """The micro-batches of each step in [start, stop), on the device."""
        ...


def make_train_loader(
    dataset: Dataset,
    recipe: Recipe,
    plan: Plan,
    context: DataContext,
    rank: int = 0,
    bad_samples: BadSamples | None = None,
    make_pipeline: MakeSamplePipeline = make_sample_pipeline,
) -> TrainLoader:
    """The loader of a recipe's data."""
    assembler = BatchAssembler(dataset, recipe, plan, rank)
    if dataset.kind == SyntheticDeviceDataset.kind:
        inline = replace(context, workers=InlineWorker())
        return RepeatedLoader(
            StreamedLoader(dataset, assembler, recipe, plan, inline, bad_samples, make_pipeline), plan
        )
    if recipe.data.preload == "device":
        return PreloadedLoader(dataset, assembler, context.to_device.move)
    return StreamedLoader(dataset, assembler, recipe, plan, context, bad_samples, make_pipeline)


@dataclass(frozen=True, slots=True)
class _SentBatches:
    """The micro-batches of a step on the device, and the copies that may not have finished."""

    micro_batches: tuple[Batch, ...]
    copies: tuple[CopyEvent, ...]

    @property
    def is_copying(self) -> bool:
        return len(self.copies) > 0

    def ready(self) -> tuple[Batch, ...]:
        """The micro-batches, for what is computed next on the device."""
        for copy in self.copies:
            copy.wait()
        return self.micro_batches


class StreamedLoader:
    """Reads, decodes and transforms samples step by step, some steps ahead."""

    def __init__(
        self,
        dataset: Dataset,
        assembler: BatchAssembler,
        recipe: Recipe,
        plan: Plan,
        context: DataContext,
        bad_samples: BadSamples | None,
        make_pipeline: MakeSamplePipeline,
    ) -> None:
        self._dataset = dataset
        self._assembler = assembler
        self._context = context
        self._bad_samples = bad_samples or BadSamples()
        self._prefetch = recipe.data.prefetch
        self._in_order = recipe.data.shuffle_window is not None
        self._open_workers = partial(open_workers, plan.backend, plan.workers)
        self._decode_threads = plan.workers if plan.backend == "threads" else 1
        self._make_pipeline = make_pipeline
        self._pipeline = lru_cache(maxsize=2)(self._make_sized_pipeline)  # prefetching may reach into the next size

    def _make_sized_pipeline(self, size: int) -> SamplePipeline:
        preprocess, augment = self._assembler.preprocess(size), self._assembler.augment
        return self._make_pipeline(self._dataset, preprocess, augment, self._decode_threads)

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        with read_ahead(self._dataset, range(start, stop), self._indices, self._in_order) as reached:
            batches = self.load((step, self._assembler.size_at(step)) for step in range(start, stop))
            for step, micro_batches in enumerate(batches, start):
                if reached is not None:
                    reached(step)
                yield micro_batches

    def _indices(self, step: int) -> I64:
        return self._assembler.sampler.indices_of(self._assembler.positions(step))

    def load(self, steps: Iterable[tuple[int, int]]) -> Iterator[tuple[Batch, ...]]:
        """The micro-batches of each (step, image size)."""
        with Prefetcher.open(self._dataset, self._context, self._open_workers, self._prefetch) as prefetcher:
            sent: _SentBatches | None = None
            for pending in prefetcher.stream(steps, partial(self._start, prefetcher)):
                try:
                    following = self._finish(prefetcher, pending)
                except DataError:
                    if sent is not None:
                        yield sent.ready()  # the step before the bad one
                    raise
                if sent is not None:
                    yield sent.ready()
                    sent = None
                if following.is_copying and not self._bad_samples.tolerated:
                    sent = following  # while it is copied, the step before it is trained
                else:
                    yield following.ready()
            if sent is not None:
                yield sent.ready()

    def _start(self, prefetcher: Prefetcher, step_and_size: tuple[int, int]) -> PendingBatch:
        step, size = step_and_size
        positions = self._assembler.positions(step)
        pipeline = self._pipeline(size)
        params = pipeline.params(self._assembler.seed, positions)
        indices = self._assembler.sampler.indices_of(positions)
        return prefetcher.start(pipeline, step, positions, indices, params, self._assembler.max_rows)

    def _finish(self, prefetcher: Prefetcher, pending: PendingBatch) -> _SentBatches:
        """Wait until a batch is filled, and start to copy it to the device."""
        positions, size = pending.positions, pending.rows["images"].shape[-1]
        if self._bad_samples.tolerated:
            self._replace_bad_samples(pending)
        else:
            try:
                pending.wait()
            except DataError as error:
                raise self._bad_samples.explain(error) from error.__cause__
        tensors = pending.tensors() | self._assembler.device_params(positions, pending.indices, size)
        batch = Batch(tensors, torch.from_numpy(positions), (len(positions),))
        began_s = time.perf_counter()
        micro_batches, copies = [], []
        for part in self._assembler.micro_batches(pending.step, positions, batch, size):
            sent, copy = self._context.to_device.send(part)
            prefetcher.buffers.hold_until_copied(pending.rows, copy)
            micro_batches.append(sent)
            copies.append(copy)
        self._context.stage_times.add({"copy": time.perf_counter() - began_s})
        return _SentBatches(tuple(micro_batches), tuple(copy for copy in copies if copy is not None))

    def _replace_bad_samples(self, pending: PendingBatch) -> None:
        """Fill the row of each bad sample from a good one, with the parameters of the row's position.

        Not when rows are filled, but here, where steps come in order: which samples are known to be bad then depends
        on the step and not on what was prefetched.
        """
        known = self._bad_samples.known("train")
        for row, error in pending.wait_for_bad_rows(known).items():
            index = int(pending.indices[row])
            epoch = int(self._assembler.sampler.epoch_of(pending.positions[row : row + 1])[0])
            if error is not None:
                self._bad_samples.add("train", index, pending.step, error)
            for other in replacements(self._assembler.seed, epoch, index, len(self._dataset)):
                if other in known:
                    continue
                pending.indices[row] = other
                if (error := pending.fill(row)) is None:
                    break
                self._bad_samples.add("train", other, pending.step, error)
            else:
                raise DataError(
                    "no training image can be read",
                    where=self._dataset.origin,
                    hint="reconv data check PATH says what is wrong with each",
                )
        self._bad_samples.sync()


class RepeatedLoader:
    """Repeats the first step's batch, which stays on the device, under the positions of each step."""

    def __init__(self, loader: StreamedLoader, plan: Plan) -> None:
        self._loader = loader
        self._plan = plan

    def steps(self, start: int, stop: int) -> Iterator[tuple[Batch, ...]]:
        first: tuple[Batch, ...] = ()
        loaded_size = 0
        for step in range(start, stop):
            size = self._plan.size_at(step)
            if size != loaded_size:
                [first] = self._loader.load([(0, size)])
                loaded_size = size
            shift = step * self._plan.global_batch
            yield tuple(Batch(batch.tensors, batch.positions + shift, batch.groups) for batch in first)
