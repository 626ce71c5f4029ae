"""Requests to update the copy of a run in an object store, and log lines about their failures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reconv.checkpoint.mirror.upload import RunMirror
from reconv.core.batch import Batch
from reconv.logging.run_logger import RunLogger
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer


class MirrorRequests(TrainerCallback):
    """Asks for a copy when training starts and after evaluations; checkpoints are found by the mirror itself."""

    def __init__(self, mirror: RunMirror, logger: RunLogger) -> None:
        self._mirror = mirror
        self._logger = logger

    def on_fit_start(self, trainer: Trainer) -> None:
        self._logger.info(f"the run is copied to {self._mirror.url}", trainer.counters.step)
        self._mirror.request()

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        problem = self._mirror.new_problem()
        if problem:
            text = f"the upload to {self._mirror.url} failed: {problem}; it will be retried, and training continues"
            self._logger.warning(text, trainer.counters.step)

    def on_evaluate_end(self, trainer: Trainer) -> None:
        self._mirror.request()
