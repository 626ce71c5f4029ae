"""What feeds a run: who fills batches, how they reach the device, and where the time for it goes.

Owns the choice of workers and carrier for a whole run, and the words about waiting for data. Refuses to know what a
batch holds. Invariant: workers live as long as the run and no longer; the words follow from measured times alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from reconv.data.dataset import Dataset
from reconv.data.decode.decode import train_preprocess
from reconv.data.pipeline.buffers import HostToDevice, as_type
from reconv.data.pipeline.decode_balance import measured_share
from reconv.data.pipeline.gpu_decoder import GpuDecoder
from reconv.data.pipeline.stage_timing import STAGES, StageTimes
from reconv.data.pipeline.thread_pool import Workers, open_workers
from reconv.data.transforms.random_params import effective
from reconv.device import Device
from reconv.device.nvjpeg import NvJpegDecoder
from reconv.errors import RecipeError
from reconv.logging.clock import RunClock
from reconv.logging.events import DataWait, EvalFinished, Event
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import IN_MEMORY

WORTH_TELLING = 0.05  # of the time of steps; less than that is noise


@dataclass(frozen=True, slots=True)
class DataContext:
    """What the loaders of a run share."""

    workers: Workers
    carrier: HostToDevice
    stages: StageTimes  # of training
    engine: GpuDecoder | None = None  # of the device that decodes some of the training images


@contextmanager
def open_data_context(recipe: Recipe, plan: Plan, device: Device, stages: StageTimes) -> Iterator[DataContext]:
    """The workers and the way to the device of one run."""
    engine = GpuDecoder(NvJpegDecoder(device.torch)) if plan.gpu_share > 0 else None
    workers = open_workers(plan.backend, plan.workers)
    try:
        yield DataContext(workers, as_type(device, recipe.data.transfer_dtype), stages, engine)
    finally:
        workers.close()
        if engine is not None:
            engine.close()


def share_of_gpu(recipe: Recipe, plan: Plan, source: Dataset, device: Device, kept: float | None) -> float:
    """What the GPU makes of a run's training images: as recorded, as the recipe says, or measured now.

    `kept` is None for a new run, 0 for one that began without the GPU.
    """
    if kept is not None and (kept > 0) != (plan.backend == "gpu"):
        raise RecipeError(
            f"this run began with {f'{kept:.0%} of' if kept else 'none of'} its images made by the GPU's JPEG engine",
            where=f"data.backend: {recipe.data.backend}",
            why="its pixels are not those of the host, and a run keeps who makes them",
            then="--set data.backend=gpu" if kept else "leave data.backend as it was, or start a new run",
        )
    wish = recipe.data.gpu_decode_fraction
    if plan.backend != "gpu" or kept is not None or wish != "auto":
        return kept or plan.gpu_share
    augment = effective(recipe.augment).model_copy(update={"decoder": plan.decoder})
    preprocess = train_preprocess(recipe.data.preprocess, augment, plan.size_at(0))
    engine = NvJpegDecoder(device.torch)
    return measured_share(source, preprocess, augment, engine, plan.workers, recipe.seed)


@dataclass(slots=True)
class Waiting:
    """Tells how long training waits for data and why: after the first evaluation, and when it is over."""

    recipe: Recipe
    plan: Plan
    source: str  # the kind of data found
    cores: int
    clock: RunClock
    stages: StageTimes
    logger: RunLogger
    is_told: bool = False

    def on_event(self, event: Event) -> None:
        """Log the waiting time after the first evaluation, a good moment to change a setting."""
        if isinstance(event, EvalFinished) and not self.is_told:
            self.tell(event.step)

    def tell(self, step: int) -> None:
        """Tell what was measured so far."""
        self.is_told = True
        fraction = min(1.0, self.clock.wait_s / self.clock.train_s) if self.clock.train_s > 0 else 0.0
        seconds = self.stages.seconds
        stage = slowest(seconds, self.clock.wait_s) if fraction >= WORTH_TELLING else ""
        helps = advice(stage, self.recipe, self.plan, self.source, self.cores) if stage else ""
        self.logger.log(DataWait(step, fraction, seconds, stage, helps))


def slowest(seconds: Mapping[str, float], wait_s: float) -> str:
    """The stage a run waited for: copying, where that took most of the wait, else what workers were busiest with."""
    if seconds["copy"] > wait_s / 2:
        return "copy"
    return max((stage for stage in STAGES if stage != "copy"), key=lambda stage: seconds[stage])


def advice(stage: str, recipe: Recipe, plan: Plan, source: str, cores: int) -> str:
    """The setting most likely to shorten a stage."""
    if source in IN_MEMORY:
        held = "--set data.preload=device keeps the images there"
        return held if source.startswith("cifar") or source == "digits" else "--set data.source=synthetic-device"
    if stage == "copy":
        return (
            "--set data.transfer_dtype=uint8"
            if recipe.data.transfer_dtype != "uint8"
            else "smaller images, or a faster bus"
        )
    if stage == "disk" and recipe.data.cache == "off" and plan.backend != "processes":
        return "--set data.cache=ram where the data fits into memory, or a faster disk"
    if plan.workers < cores:
        return f"--workers {cores}"
    if source != "packed":
        return "reconv data convert DIR FAST --to packed --shortest 320 --quality 90, then --data FAST"
    if stage == "augment":
        return "fewer changes of colour on the host (augment.auto_augment, augment.color_jitter), or more cores"
    return "reconv data convert with --raw or a smaller --shortest, or more cores"
