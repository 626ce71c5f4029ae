"""Watching for steps that are not finite, one step late, so that the host never waits for the device on every step.

Owns the policy (stop, or skip within a budget). Refuses to know what made the number. Invariant: a step's verdict is
known before its weights can be saved, and `settle` leaves nothing pending.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import DivergedError
from reconv.logging.events import NonFiniteStep
from reconv.logging.run_logger import RunLogger
from reconv.precision.accumulate import to_accumulate_dtype
from reconv.trainer.protocols import DeviceProtocol
from reconv.trainer.step import StepResult

NUM_SAMPLES_NAMED = 16


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    read: Callable[[], Tensor]
    batches: Sequence[Batch]


class NanGuard:
    """Reads each step's verdict after the next step has been started."""

    def __init__(
        self,
        device: DeviceProtocol,
        logger: RunLogger,
        *,
        policy: str,
        budget: int,
        loss_scale: Callable[[], Tensor | None] = lambda: None,
        skipped: int = 0,
        gather: Callable[[list[int]], list[list[int]]] = lambda samples: [samples],
    ) -> None:
        """`gather` gives what each of several processes has."""
        self._device = device
        self._logger = logger
        self._policy = policy
        self._budget = budget
        self._loss_scale = loss_scale  # a dynamic one overflows now and then by design, until it is down to 1
        self._pending: _Pending | None = None
        self._gather = gather
        self.skipped = skipped  # steps not applied so far, counted over all attempts

    def started(self, step: int, result: StepResult, batches: Sequence[Batch]) -> None:
        """A step is under way: read the one before it."""
        scale = self._loss_scale()
        lowered = torch.ones_like(result.ok) if scale is None else scale <= 1
        verdict = torch.stack(
            [to_accumulate_dtype(value) for value in (result.ok, result.loss, torch.isfinite(result.loss), lowered)]
        )
        previous, self._pending = self._pending, _Pending(step, self._device.copy_to_host(verdict), batches)
        if previous is not None:
            self._judge(previous)

    def settle(self) -> None:
        """Wait for the last step's verdict: before a save, and at the end."""
        previous, self._pending = self._pending, None
        if previous is not None:
            self._judge(previous)

    def _judge(self, pending: _Pending) -> None:
        ok, loss, loss_is_finite, scale_is_lowest = pending.read().tolist()
        if ok or (loss_is_finite and not scale_is_lowest):
            return
        self.skipped += 1
        stop = self._policy == "stop" or self.skipped > self._budget
        own = [int(i) for batch in pending.batches for i in batch["indices"].tolist()]
        samples = [index for share in self._gather(own) for index in share]
        what = "gradient" if loss_is_finite else "loss"
        self._logger.log(NonFiniteStep(pending.step + 1, loss, tuple(samples), "stop" if stop else "skip"))
        if stop:
            named = ", ".join(map(str, samples[:NUM_SAMPLES_NAMED])) + (
                ", ..." if len(samples) > NUM_SAMPLES_NAMED else ""
            )
            raise DivergedError(
                f"step {pending.step + 1}: the {what} is not finite; its update was not applied",
                where=f"training samples {named}",
                why="a learning rate too high, a bad input, or half precision without loss scaling"
                if self._policy == "stop"
                else f"{self.skipped} steps were skipped, more than engine.non_finite.max_skipped={self._budget}",
                then="lower the rate (--lr), or skip a few such steps: --set engine.non_finite.policy=skip",
            )
