"""Detection of steps whose loss or gradient is not finite.

A step is checked while the next one runs, so that the host never waits for the device on every step; before a
checkpoint is saved all steps have been checked.

Such a step changes nothing: optimizer, batch norm statistics and EMA take the boolean tensor `ok` and select by it
(tests/trainer/test_nan_guard.py, tests/trainer/test_step.py).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.core.errors import DivergedError
from reconv.device import Device
from reconv.logging.events import NonFiniteStep
from reconv.logging.run_logger import RunLogger
from reconv.precision.policy import to_accumulate_dtype
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer

MAX_LISTED_SAMPLES = 16


@dataclass(frozen=True, slots=True)
class _PendingCheck:
    step: int
    read: Callable[[], Tensor]  # of ok, loss, weight if that is a tensor, and loss scale
    weight: float | None  # of the global batch; None: it is read
    batches: Sequence[Batch]


class NanGuard(TrainerCallback):
    """Stops the run at a step that is not finite, or tolerates a number of them."""

    def __init__(
        self,
        device: Device,
        logger: RunLogger,
        *,
        policy: str,
        max_skipped: int,
        loss_scale: Callable[[], Tensor | None] = lambda: None,
        skipped: int = 0,
        all_gather: Callable[[list[int]], list[list[int]]] = lambda samples: [samples],
        on_loss: Callable[[int, float, bool], None] = lambda step, loss, ok: None,
    ) -> None:
        self._device = device
        self._logger = logger
        self._policy = policy
        self._max_skipped = max_skipped
        self._loss_scale = loss_scale  # a dynamic scale overflows by design until it is down to 1
        self._all_gather = all_gather
        self._on_loss = on_loss  # gets each step, its mean loss and whether it is finite
        self._pending: _PendingCheck | None = None
        self.skipped = skipped  # steps not applied, including those before a resume

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        self.add(step, result, micro_batches)

    def on_save_start(self, trainer: Trainer) -> None:
        self.flush()
        trainer.counters.skipped = self.skipped

    def on_rollback(self, trainer: Trainer) -> None:
        self._pending, self.skipped = None, trainer.counters.skipped

    def on_fit_end(self, trainer: Trainer) -> None:
        self.on_save_start(trainer)

    def add(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        """Start reading the result of a step, and check the step before it."""
        scale = self._loss_scale()
        weight = result.weight if isinstance(result.weight, Tensor) else None
        values = [value for value in (result.ok, result.loss, weight, scale) if value is not None]
        packed = torch.stack([to_accumulate_dtype(value) for value in values])
        read = self._device.copy_to_host(packed)
        known_weight = None if isinstance(result.weight, Tensor) else float(result.weight)
        previous, self._pending = self._pending, _PendingCheck(step, read, known_weight, batches)
        if previous is not None:
            self._check(previous)

    def flush(self) -> None:
        """Wait for the last step and check it."""
        previous, self._pending = self._pending, None
        if previous is not None:
            self._check(previous)

    def _check(self, pending: _PendingCheck) -> None:
        ok, loss, *more = pending.read().tolist()
        weight = pending.weight if pending.weight is not None else more.pop(0)
        loss_is_finite = math.isfinite(loss)
        is_applied = bool(ok) or (loss_is_finite and any(value > 1 for value in more))
        self._on_loss(pending.step, loss / weight if weight else loss, is_applied)
        if is_applied:
            return
        self.skipped += 1
        stop = self._policy == "stop" or self.skipped > self._max_skipped
        own = [int(i) for batch in pending.batches for i in batch["indices"].tolist()]
        samples = [index for of_rank in self._all_gather(own) for index in of_rank]
        self._logger.log(NonFiniteStep(pending.step + 1, loss, tuple(samples), "stop" if stop else "skip"))
        if stop:
            raise self._error(pending.step + 1, "gradient" if loss_is_finite else "loss", samples)

    def _error(self, step: int, what: str, samples: Sequence[int]) -> DivergedError:
        listed = ", ".join(map(str, samples[:MAX_LISTED_SAMPLES]))
        return DivergedError(
            f"step {step}: the {what} is not finite; its update was not applied",
            where=f"training samples {listed}{', ...' if len(samples) > MAX_LISTED_SAMPLES else ''}",
            why="the learning rate is too high, an input is bad, or half precision lacks loss scaling"
            if self._policy == "stop"
            else f"{self.skipped} steps were skipped, more than engine.non_finite.max_skipped={self._max_skipped}",
            hint="lower the learning rate (--lr), or skip such steps: --set engine.non_finite.policy=skip",
        )
