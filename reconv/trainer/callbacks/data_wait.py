"""Loggers of the time training waits for data, and of the fingerprint of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconv.build.data import Datasets
from reconv.core.batch import Batch
from reconv.data.stage_timing import STAGES, StageTimes
from reconv.logging.clock import RunClock
from reconv.logging.events import DataFingerprint, DataWait
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import IN_MEMORY
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer

MIN_WAIT_FRACTION = 0.05  # of the time of steps; less than that is noise
MIN_WAIT_S = 2.0  # of the whole run; less than that is not worth a setting


@dataclass(slots=True)
class DataFingerprintLogger(TrainerCallback):
    """Logs the fingerprint of the data after the first step, by when it is computed."""

    datasets: Datasets
    logger: RunLogger
    is_logged: bool = False

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        if not self.is_logged:
            self.is_logged = True
            fingerprint = self.datasets.fingerprint()
            self.logger.log(DataFingerprint(fingerprint["train"], fingerprint["val"]))


@dataclass(slots=True)
class DataWaitLogger(TrainerCallback):
    """Logs how long training waits for data and why: after the first evaluation, and at the end."""

    recipe: Recipe
    plan: Plan
    dataset_kind: str
    num_cores: int
    clock: RunClock
    stage_times: StageTimes
    logger: RunLogger
    is_logged: bool = False

    def on_evaluate_end(self, trainer: Trainer) -> None:
        if not self.is_logged:  # the first evaluation is early enough to change a setting
            self.log(trainer.counters.step)

    def teardown(self, trainer: Trainer) -> None:
        self.log(trainer.counters.step)

    def log(self, step: int) -> None:
        """Log what was measured so far."""
        self.is_logged = True
        fraction = min(1.0, self.clock.wait_s / self.clock.train_s) if self.clock.train_s > 0 else 0.0
        seconds = self.stage_times.seconds
        run_wait_s = self.clock.wait_s * self.plan.total_steps / max(1, step)  # of the whole run, at this pace
        is_worth_it = fraction >= MIN_WAIT_FRACTION and run_wait_s > MIN_WAIT_S
        stage = slowest_stage(seconds, self.clock.wait_s) if is_worth_it else ""
        advice = data_wait_advice(stage, self.recipe, self.plan, self.dataset_kind, self.num_cores) if stage else ""
        self.logger.log(DataWait(step, fraction, seconds, stage, advice))


def slowest_stage(seconds: Mapping[str, float], wait_s: float) -> str:
    """The stage a run waited for: copying, if that took most of the wait, else what kept the workers busiest."""
    if seconds["copy"] > wait_s / 2:
        return "copy"
    return max((stage for stage in STAGES if stage != "copy"), key=lambda stage: seconds[stage])


def data_wait_advice(stage: str, recipe: Recipe, plan: Plan, dataset_kind: str, num_cores: int) -> str:
    """The setting most likely to shorten a stage."""
    if dataset_kind in IN_MEMORY:
        if dataset_kind.startswith("cifar") or dataset_kind == "digits":
            return "--set data.preload=device keeps the images there"
        return "--set data.source=synthetic-device"
    if stage == "copy":
        is_uint8 = recipe.data.transfer_dtype == "uint8"
        return "smaller images, or a faster bus" if is_uint8 else "--set data.transfer_dtype=uint8"
    if stage == "disk" and recipe.data.cache == "off" and plan.backend != "processes":
        return "--set data.cache=ram if the data fits in memory, or a faster disk"
    if plan.workers < num_cores:
        return f"--workers {num_cores}"
    if dataset_kind != "packed":
        return "reconv data convert DIR FAST --to packed --shortest 320 --quality 90, then --data FAST"
    if stage == "augment":
        return "less color augmentation on the host (augment.auto_augment, augment.color_jitter), or more cores"
    return "reconv data convert with --raw or a smaller --shortest, or more cores"
