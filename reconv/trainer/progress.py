"""The progress of a run: its counters, and the log of loss, metrics and throughput."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from reconv.logging.events import TrainProgress
from reconv.precision.policy import to_accumulate_dtype
from reconv.trainer.step import StepResult
from reconv.trainer.train_state import TrainState

if TYPE_CHECKING:
    from reconv.trainer.run import TrainingRun


@dataclass(slots=True)
class Counters:
    """State of a checkpoint besides tensors."""

    step: int = 0  # steps done
    history: list[dict[str, Any]] = field(default_factory=list)  # of each evaluation: step, weights, metrics
    skipped: int = 0  # steps that were not finite
    callbacks: dict[str, Any] = field(default_factory=dict)  # the state of the user's callbacks, by name
    divergence: dict[str, Any] = field(default_factory=dict)  # the state of the divergence guard, and `lr_factor`

    @classmethod
    def from_state(cls, state: Mapping[str, Any]) -> Counters:
        """The counters in the state of a checkpoint."""
        own = state.get("callbacks", {}), dict(state.get("divergence", {}))
        return cls(state["step"], list(state["history"]), state["skipped"], *own)

    def go_back(self, earlier: Counters) -> None:
        """Take the values of an earlier step."""
        for counter in fields(self):
            setattr(self, counter.name, getattr(earlier, counter.name))

    def values(self, metric: str, weights: str) -> list[float]:
        """A metric at each evaluation of some weights, in order."""
        return [h["metrics"][metric] for h in self.history if h["weights"] == weights]

    def evaluated_at(self, step: int) -> bool:
        return any(h["step"] == step for h in self.history)


@dataclass(frozen=True, slots=True)
class _PendingProgress:
    """Progress to log once the device has computed the sums."""

    make_event: Callable[..., TrainProgress]  # from loss, metrics, grad_norm and loss_scale
    metric_names: tuple[str, ...]
    read: Callable[[], Tensor]  # of loss, weight, gradient norm, loss scale and metrics
    has_loss_scale: bool


# The result of the last step; the sums of loss, metrics and weight.
ProgressSums = tuple[StepResult | None, Tensor | None, dict[str, Tensor], Tensor | float]


class ProgressLogger:
    """Sums loss and metrics on the device between two log points, and logs their means with the throughput.

    Where it `is_deferred`, `log` does not wait for the device, which would have nothing to do until the host has
    launched the next step: the values are read and logged by `flush`. A run that logs every step, as a dry run does,
    is not deferred.
    """

    def __init__(self, run: TrainingRun, train_state: TrainState) -> None:
        self._run = run
        self._state = train_state
        self._pending: _PendingProgress | None = None
        self.is_deferred = run.device.kind != "cpu" and run.plan.log.steps != 1
        self.reset()

    def reset(self) -> None:
        """Begin new sums."""
        self._last: StepResult | None = None
        self._loss: Tensor | None = None
        self._metrics: dict[str, Tensor] = {}
        self._weight: Tensor | float = 0.0

    def state(self) -> ProgressSums:
        """The sums so far, to continue from with `go_back`."""
        return self._last, self._loss, dict(self._metrics), self._weight

    def go_back(self, state: ProgressSums) -> None:
        """Continue from sums of an earlier step."""
        self._pending = None
        self._last, self._loss, self._metrics, self._weight = state
        self._metrics = dict(self._metrics)

    def add(self, result: StepResult) -> None:
        """Add the result of a step, without reading it."""
        self._last = result
        # The sums have the accumulate dtype, to which addition promotes the other operand.
        self._loss = to_accumulate_dtype(result.loss) if self._loss is None else self._loss + result.loss
        self._weight = self._weight + result.weight
        for name, value in result.metrics.items():
            total = self._metrics.get(name)
            self._metrics[name] = to_accumulate_dtype(value) if total is None else total + value

    def log(self, step: int) -> None:
        """Log the steps since the last call, if there are any; `step` is the number of steps done."""
        self.flush()
        if self._loss is None or self._last is None:
            return
        run, plan = self._run, self._run.plan
        rates = run.clock.interval()
        make_event = partial(
            TrainProgress,
            step=step,
            epoch=step / plan.steps_per_epoch,
            lr=self._state.lr_schedule(step - 1),
            metrics_note="on mixed images" if run.recipe.augment.mixes else "",
            images_per_s=rates.images_per_s,
            compute_images_per_s=rates.compute_images_per_s,
            data_wait_fraction=rates.data_wait_fraction,
            memory_bytes=run.device.peak_memory_bytes(),
            eta_s=run.clock.eta_s((plan.total_steps - step) * plan.global_batch),
        )
        loss_scale = self._state.network.precision.loss_scale
        values = (self._loss, self._weight, self._last.grad_norm, 1.0 if loss_scale is None else loss_scale)
        read = run.device.copy_to_host(_stack((*values, *self._metrics.values()), self._loss))
        self._pending = _PendingProgress(make_event, tuple(self._metrics), read, loss_scale is not None)
        self.reset()
        if not self.is_deferred:
            self.flush()

    def flush(self) -> None:
        """Log what `log` was called for last; waits until the device has computed it."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        # One read for all values: each would make the host wait for the device.
        loss, weight, grad_norm, loss_scale, *metrics = pending.read().tolist()
        sums = dict(zip(pending.metric_names, metrics, strict=True))
        self._run.logger.log(
            pending.make_event(
                loss=loss / weight,
                metrics=self._state.task.train_metrics(sums, weight),
                grad_norm=grad_norm,
                loss_scale=loss_scale if pending.has_loss_scale else None,
            )
        )


def _stack(values: Sequence[Tensor | float], like: Tensor) -> Tensor:
    """Scalars as one tensor with the dtype and device of another one."""
    return torch.stack([value.to(like) if isinstance(value, Tensor) else like.new_full((), value) for value in values])
