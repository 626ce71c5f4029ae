"""Hooks of the training loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from reconv.core.batch import Batch
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer


class TrainerCallback:
    """Called by `Trainer.fit`; every hook does nothing unless it is overridden.

    Steps count from 0, and `trainer.counters.step` is the number of finished steps.
    """

    def on_fit_start(self, trainer: Trainer) -> None:
        """Training starts, or continues after a resume."""

    def on_batch_fetch_start(self, trainer: Trainer, step: int) -> None:
        """The batches of a step are about to be fetched."""

    def on_batch_fetch_end(self, trainer: Trainer, step: int) -> None:
        """The batches of a step have been fetched."""

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        """A step was launched; the device may still be working on it."""

    def on_evaluate_end(self, trainer: Trainer) -> None:
        """An evaluation has ended and its metrics are in `trainer.counters.history`."""

    def on_save_start(self, trainer: Trainer) -> None:
        """A checkpoint is about to be saved."""

    def on_rollback(self, trainer: Trainer) -> None:
        """Training has gone back to `trainer.counters`, because later steps were wrong."""

    def on_fit_end(self, trainer: Trainer) -> None:
        """Training has finished and its last checkpoint is saved; not called after an error or a stop signal."""

    def teardown(self, trainer: Trainer) -> None:
        """Training has ended, normally or not."""
