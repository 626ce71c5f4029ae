"""The progress of a run: its counters, and the log of loss, metrics and throughput."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconv.logging.events import TrainProgress
from reconv.precision.accumulate import to_accumulate_dtype
from reconv.trainer.build.train_state import TrainState
from reconv.trainer.lr_schedule import learning_rate
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.training_run import TrainingRun


@dataclass(slots=True)
class Counters:
    """What a checkpoint must know besides tensors."""

    step: int = 0  # steps done
    history: list[dict[str, Any]] = field(default_factory=list)  # of each evaluation: step, weights, metrics
    skipped: int = 0  # steps that were not finite
    callbacks: dict[str, Any] = field(default_factory=dict)  # the state of the user's callbacks, by name

    def values(self, metric: str, weights: str) -> list[float]:
        """A metric at each evaluation of some weights, in order."""
        return [h["metrics"][metric] for h in self.history if h["weights"] == weights]

    def evaluated_at(self, step: int) -> bool:
        return any(h["step"] == step for h in self.history)


class ProgressLogger:
    """Sums loss and metrics on the device between two log points, and logs their means with the throughput."""

    def __init__(self, run: TrainingRun, train_state: TrainState) -> None:
        self._run = run
        self._state = train_state
        self._reset()

    def _reset(self) -> None:
        self._last: StepResult | None = None
        self._loss: Tensor | None = None
        self._metrics: dict[str, Tensor] = {}
        self._weight: Tensor | float = 0.0

    def add(self, result: StepResult) -> None:
        """Add the result of a step, without reading it."""
        self._last = result
        self._loss = (
            to_accumulate_dtype(result.loss) if self._loss is None else self._loss + to_accumulate_dtype(result.loss)
        )
        self._weight = self._weight + result.weight
        for name, value in result.metrics.items():
            self._metrics[name] = to_accumulate_dtype(value) + self._metrics.get(name, 0.0)

    def log(self, step: int) -> None:
        """Log the steps since the last call, if there are any; `step` is the number of steps done."""
        if self._loss is None or self._last is None:
            return
        run, plan = self._run, self._run.plan
        # One read for all values: each would make the host wait for the device.
        values = torch.stack([self._loss, to_accumulate_dtype(self._last.grad_norm), *self._metrics.values()]).tolist()
        metrics, weight = dict(zip(self._metrics, values[2:], strict=True)), float(self._weight)
        rates = run.clock.interval()
        loss_scale = self._state.network.precision.loss_scale
        run.logger.log(
            TrainProgress(
                step=step,
                epoch=step / plan.steps_per_epoch,
                loss=values[0] / weight,
                lr=learning_rate(plan.schedule, step - 1),
                metrics=self._state.task.train_metrics(metrics, weight),
                metrics_note="on mixed images" if run.recipe.augment.mixes else "",
                grad_norm=values[1],
                images_per_s=rates.images_per_s,
                compute_images_per_s=rates.compute_images_per_s,
                data_wait_fraction=rates.data_wait_fraction,
                memory_bytes=run.device.peak_memory_bytes(),
                eta_s=run.clock.eta_s((plan.total_steps - step) * plan.global_batch),
                loss_scale=None if loss_scale is None else float(loss_scale),
            )
        )
        self._reset()
