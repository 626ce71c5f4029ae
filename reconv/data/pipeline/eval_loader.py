"""Validation batches: every sample exactly once, in batches fixed by position and dealt whole to ranks.

A loader that is used again may keep the batches of a small set: preprocessing for evaluation is not random.

Several ranks give the bits of one process (tests/laws/test_law_ranks_resume.py).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from functools import partial

import numpy as np
import torch

from reconv.core.batch import Batch
from reconv.core.errors import DataError
from reconv.data.dataset import I64, Dataset
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.kept_batches import KeptBatches
from reconv.data.pipeline.prefetcher import DataContext, PendingBatch, Prefetcher
from reconv.data.pipeline.read_ahead import read_ahead
from reconv.data.pipeline.samples import (
    MAX_PREPROCESSED_BYTES,
    MakeSamplePipeline,
    SamplePipeline,
    make_sample_pipeline,
)
from reconv.data.pipeline.workers.thread_pool import open_workers
from reconv.recipe.parts.data import PreprocessConfig
from reconv.recipe.plan import EVAL_AHEAD


class EvalLoader:
    """The validation batches of one rank; the last one may be short."""

    def __init__(
        self,
        dataset: Dataset,
        preprocess: PreprocessConfig,
        batch_size: int,
        context: DataContext,
        num_workers: int = 0,
        rank: int = 0,
        world_size: int = 1,
        bad_samples: BadSamples | None = None,
        make_pipeline: MakeSamplePipeline = make_sample_pipeline,
        finished: Collection[int] = (),
        keeps_decoded: bool = False,
    ) -> None:
        """`num_workers` threads are opened for each pass if the context has no workers.

        The ranks share the batches whose numbers are not in `finished`. With `keeps_decoded` later passes decode
        nothing, if the set is small and has no bad samples.
        """
        self.whole_batch: int | None = None  # the number of the last batch; None: bad samples were left out of it
        self._dataset = dataset
        self._context = context
        self._bad_samples = bad_samples or BadSamples()
        self._batch_size = batch_size
        self._open_workers = partial(open_workers, "threads", num_workers)
        left = [number for number in range(-(-len(dataset) // batch_size)) if number not in finished]
        self._batches = left[rank::world_size]
        self._pipeline: SamplePipeline = make_pipeline(dataset, preprocess, None, 1)
        keeps = keeps_decoded and self._fits_in_memory()
        self._kept = KeptBatches(self._batches, batch_size, context.to_device) if keeps else None

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        return self.after(0)

    def after(self, steps_done: int) -> Iterator[Batch]:
        """The batches, evaluated after `steps_done` training steps; tolerated bad samples are left out."""
        if self._kept is not None and self._kept.is_complete:
            for number, batch in self._kept.send():
                self.whole_batch = number
                yield batch
            return
        with (
            read_ahead(self._dataset, self._batches, self._indices, in_order=True) as reached,
            Prefetcher.open(self._dataset, self._context, self._open_workers, EVAL_AHEAD) as prefetcher,
        ):
            for pending in prefetcher.stream(self._batches, partial(self._start, prefetcher)):
                self._wait(pending, steps_done)
                if reached is not None:
                    reached(pending.step)
                if len(pending.positions):
                    positions = torch.from_numpy(pending.positions)
                    filled = Batch(pending.tensors(), positions, (len(positions),))
                    batch, copy = self._context.to_device.send(filled)
                    if copy is not None:
                        copy.wait()
                    prefetcher.buffers.hold_until_copied(pending.rows, copy)
                    is_whole = len(positions) == len(self._indices(pending.step))
                    self.whole_batch = pending.step if is_whole else None
                    if not is_whole:
                        self._kept = None  # bad samples were left out of it
                    elif self._kept is not None:
                        self._kept.add(pending.step, filled)
                    yield batch
        if len(self._bad_samples.known("val")) == len(self._dataset):
            raise DataError(
                "no validation image can be read",
                where=self._dataset.origin,
                why=f"all {len(self._dataset):,} are bad; a metric over no images would look like a bad model",
                hint="reconv data check PATH says what is wrong with each",
            )

    def _fits_in_memory(self) -> bool:
        """True if decoded batches are kept: if the host decodes them, which takes long, and they are small."""
        is_decoded = self._pipeline.min_rows_per_task is not None
        row_bytes = sum(column.empty(1).nbytes for column in self._pipeline.columns)
        return is_decoded and len(self._batches) * self._batch_size * row_bytes <= MAX_PREPROCESSED_BYTES

    def _indices(self, number: int) -> I64:
        stop = min((number + 1) * self._batch_size, len(self._dataset))
        return np.arange(number * self._batch_size, stop, dtype=np.int64)

    def _start(self, prefetcher: Prefetcher, number: int) -> PendingBatch:
        positions = self._indices(number)
        params = self._pipeline.params(0, positions)
        return prefetcher.start(self._pipeline, number, positions, positions, params, self._batch_size)

    def _wait(self, pending: PendingBatch, steps_done: int) -> None:
        """Wait for the rows and drop those of bad samples, where they are tolerated."""
        if not self._bad_samples.tolerated:
            try:
                pending.wait()
            except DataError as bad_image:
                raise self._bad_samples.explain(bad_image) from bad_image.__cause__
            return
        bad = pending.wait_for_bad_rows(self._bad_samples.known("val"))
        for row, error in bad.items():
            if error is not None:
                self._bad_samples.add("val", int(pending.indices[row]), steps_done, error)
        pending.drop(bad)
