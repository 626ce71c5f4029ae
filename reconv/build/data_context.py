"""The data workers of a run, and how long training waits for data."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, closing, contextmanager

from reconv.data.pipeline.buffers import with_transfer_dtype
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.workers.thread_pool import open_workers
from reconv.data.stage_timing import StageTimes
from reconv.device import Device
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe


@contextmanager
def open_data_context(recipe: Recipe, plan: Plan, device: Device, stage_times: StageTimes) -> Iterator[DataContext]:
    """The workers and the transfer to the device of one run; closed at the end."""
    with ExitStack() as stack:
        workers = stack.enter_context(closing(open_workers(plan.backend, plan.workers)))
        eval_workers = workers
        if plan.eval_backend != plan.backend:
            eval_workers = stack.enter_context(closing(open_workers(plan.eval_backend, plan.workers)))
        to_device = with_transfer_dtype(device, recipe.data.transfer_dtype)
        yield DataContext(to_device, workers, stage_times, eval_workers)
