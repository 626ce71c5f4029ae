"""The loop: steps until the plan is done, with logging, evaluation and saving where they are due.

Owns the order of those four and the counters of a run. Refuses to know tasks, models, devices and files. Invariant:
what is saved is a state some uninterrupted run has too; evaluation comes before the save of the same step.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.errors import ExitCode, PreemptedError, ReconvError
from reconv.inference.evaluate import EvaluationStopped
from reconv.logging.events import EvalFinished, TrainProgress
from reconv.logging.run_logger import RunLogger
from reconv.precision.accumulate import to_accumulate_dtype
from reconv.recipe.plan import Plan
from reconv.tasks.task import Task
from reconv.trainer.early_stopping import EarlyStopping
from reconv.trainer.nan_guard import NanGuard
from reconv.trainer.protocols import DeviceProtocol, TrainBatches
from reconv.trainer.step import StepResult
from reconv.trainer.stop_signal import StopSignal


class Step(Protocol):
    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult: ...


class RatesProtocol(Protocol):
    """Throughput of an interval."""

    @property
    def images_per_s(self) -> float | None: ...
    @property
    def compute_images_per_s(self) -> float | None: ...
    @property
    def data_wait_fraction(self) -> float: ...


class ClockProtocol(Protocol):
    """Tells time spent waiting for data from time spent computing."""

    def waiting(self) -> Any: ...
    def paused(self) -> Any: ...
    def stepped(self, images: int) -> None: ...
    def interval(self) -> RatesProtocol: ...
    def eta_s(self, images_left: int) -> float | None: ...


class StoppedWithoutSaveError(ReconvError):
    """A signal ended a run that saves nothing."""

    def __init__(self, number: int) -> None:
        super().__init__(
            "stopped without a save", why="save.every is off", then="set save.every, as in --set save.every=1ep"
        )
        self.code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED


@dataclass(slots=True)
class Counters:
    """What a checkpoint must know besides tensors."""

    step: int = 0  # steps done
    history: list[dict[str, Any]] = field(default_factory=list)  # one entry an evaluation: step, weights, metrics
    skipped: int = 0

    def best(self, metric: str, weights: str) -> tuple[int, float] | None:
        """The step and value of the best evaluation so far; the earliest of equals."""
        scored = [(h["metrics"][metric], -h["step"]) for h in self.history if h["weights"] == weights]
        return (-max(scored)[1], max(scored)[0]) if scored else None

    def values(self, metric: str, weights: str) -> list[float]:
        """A metric at each evaluation of some weights, in order."""
        return [h["metrics"][metric] for h in self.history if h["weights"] == weights]

    def evaluated_at(self, step: int) -> bool:
        return any(h["step"] == step for h in self.history)


@dataclass(slots=True)
class Trainer:
    """A run's parts and its counters; `run` is the loop."""

    plan: Plan
    task: Task
    step: Step
    rate: Callable[[int], float]
    batches: TrainBatches
    evaluate: Callable[[int, float, Callable[[], bool]], list[EvalFinished]]
    save: Callable[[Counters, str], None] | None  # None: nothing is ever written
    watch: NanGuard
    clock: ClockProtocol
    device: DeviceProtocol
    logger: RunLogger
    stop: StopSignal
    counters: Counters
    metric: str
    chosen_weights: str  # raw or ema: whose metric decides what is best
    metrics_note: str = ""
    keep_best: bool = True
    loss_scale: Callable[[], Tensor | None] = lambda: None
    early: EarlyStopping = field(default_factory=EarlyStopping)
    # The largest of each number over all processes, who may hear a signal or a clock at different steps.
    agree: Callable[[Sequence[int]], tuple[int, ...]] = tuple
    # Hear how a save that goes on beside the steps has ended; True: wait until it has.
    settle_save: Callable[[bool], None] = lambda wait: None
    ended_early: str = ""  # why the run ended before its length, if it did
    _last_save_s: float = field(default_factory=time.monotonic)
    _saved_step: int = -1
    _is_time_to_save: int = 0  # by the clock, as of the step before

    def run(self) -> None:
        """Train from the counters' step to the plan's end."""
        start, total = self.counters.step, self.plan.total_steps
        self._saved_step = start
        if self._catch_up(start):
            return
        interval = _Interval()
        for step, micro_batches in enumerate(self._fetched(start, total), start):
            result = self.step(step, micro_batches)
            self.device.step_boundary()
            self.watch.started(step, result, micro_batches)
            interval.add(result)
            self.clock.stepped(self.plan.global_batch)
            self.counters.step = step + 1
            self.settle_save(False)
            if self.plan.log.due(step + 1, total):
                self._log(step, interval, result)
                interval = _Interval()
            improved = self._evaluate_if_due(step + 1)
            ends = self._ends_early(step + 1)
            self._save_if_due(step + 1, improved)
            if ends:
                if not interval.is_empty:
                    self._log(step, interval, result)
                break
            is_asked, self._is_time_to_save = self.agree([self.stop.requested, self._clock_says_save()])
            if self._evaluation_missing(step + 1) or (is_asked and step + 1 < total):
                self._leave(step + 1)
        self.watch.settle()
        self.counters.skipped = self.watch.skipped
        self._wait_for_save()

    def _catch_up(self, start: int) -> bool:
        """Do the evaluation that a stop cut short, and say whether the run is over with it."""
        num_evaluated = len(self.counters.history)
        self._evaluate_if_due(start)
        if self._evaluation_missing(start):
            self._leave(start)
        ends = self._ends_early(start)
        if self.save is not None and len(self.counters.history) > num_evaluated:
            self._save(start, "end" if ends or start == self.plan.total_steps else "interval")
        return ends

    def _fetched(self, start: int, total: int) -> Any:
        """The stream of micro-batches, with the time spent waiting for each on the clock."""
        stream = self.batches.steps(start, total)
        for _ in range(start, total):
            with self.clock.waiting():
                micro_batches = next(stream)
            yield micro_batches

    def _log(self, step: int, interval: _Interval, result: StepResult) -> None:
        loss, metrics, weight, grad_norm = interval.read(result)
        rates = self.clock.interval()
        scale = self.loss_scale()
        done, plan = step + 1, self.plan
        self.logger.log(
            TrainProgress(
                step=done,
                epoch=done / plan.steps_per_epoch,
                loss=loss / weight,
                lr=self.rate(step),
                metrics=self.task.train_metrics(metrics, weight),
                metrics_note=self.metrics_note,
                grad_norm=grad_norm,
                images_per_s=rates.images_per_s,
                compute_images_per_s=rates.compute_images_per_s,
                data_wait_fraction=rates.data_wait_fraction,
                memory_bytes=self.device.peak_memory_bytes(),
                eta_s=self.clock.eta_s((plan.total_steps - done) * plan.global_batch),
                loss_scale=None if scale is None else float(scale),
            )
        )

    def _evaluation_missing(self, done: int) -> bool:
        every = self.plan.evaluate
        due = every is not None and done > 0 and every.due(done, self.plan.total_steps)
        return due and not self.counters.evaluated_at(done)

    def _evaluate_if_due(self, done: int) -> bool:
        """Evaluate, and say whether the chosen metric is the best so far."""
        if not self._evaluation_missing(done):
            return False
        before = self.counters.best(self.metric, self.chosen_weights)
        try:
            with self.clock.paused():
                results = self.evaluate(done, done / self.plan.steps_per_epoch, lambda: self.stop.requested)
        except EvaluationStopped:
            return False
        for result in results:
            self.counters.history.append({"step": done, "weights": result.weights, "metrics": dict(result.metrics)})
        after = self.counters.best(self.metric, self.chosen_weights)
        improved = after is not None and (before is None or after[1] > before[1])
        for result in results:
            self.logger.log(replace(result, best=improved and result.weights == self.chosen_weights))
        return improved

    def _ends_early(self, done: int) -> bool:
        """Whether the evaluation at this step ends the run before its length."""
        if done < self.plan.total_steps and self.counters.evaluated_at(done):
            self.ended_early = self.early.reason(self.metric, self.counters.values(self.metric, self.chosen_weights))
        return bool(self.ended_early)

    def _clock_says_save(self) -> bool:
        """Whether the clock of this process says so."""
        minutes = None if self.plan.save is None else self.plan.save.minutes
        return minutes is not None and time.monotonic() - self._last_save_s >= 60 * minutes

    def _save_if_due(self, done: int, improved: bool) -> None:
        every = self.plan.save
        if self.save is None or every is None:
            return
        # What processes agree on is one step old: it may be of before the last save.
        by_clock = self._is_time_to_save and (self.plan.world_size == 1 or done > self._saved_step + 1)
        if self.ended_early or done == self.plan.total_steps:
            self._save(done, "end")
        elif every.due(done, self.plan.total_steps) or by_clock:
            self._save(done, "interval")
        elif done in self.plan.keep_steps:
            self._save(done, "pinned")
        elif improved and self.keep_best:
            self._save(done, "best")

    def _save(self, done: int, reason: str) -> None:
        assert self.save is not None
        with self.clock.paused():
            self.watch.settle()
            self.counters.skipped = self.watch.skipped
            self.save(self.counters, reason)
        self._saved_step = done
        self._last_save_s = time.monotonic()

    def _wait_for_save(self) -> None:
        with self.clock.paused():
            self.settle_save(True)

    def _leave(self, done: int) -> None:
        number = self.stop.signal_number or signal.SIGTERM
        if self.save is None:
            raise StoppedWithoutSaveError(number)
        if self._saved_step != done:
            self._save(done, "stop")
        self._wait_for_save()
        raise PreemptedError(
            f"stopped by {signal.Signals(number).name} after step {done} of {self.plan.total_steps}; saved",
            then="run the same command with --resume",
        )


class _Interval:
    """Sums since the last log point, kept on the device until they are read."""

    def __init__(self) -> None:
        self._loss: Tensor | None = None
        self._metrics: dict[str, Tensor] = {}
        self._weight: Tensor | float = 0.0

    @property
    def is_empty(self) -> bool:
        return self._loss is None

    def add(self, result: StepResult) -> None:
        self._loss = (
            to_accumulate_dtype(result.loss) if self._loss is None else self._loss + to_accumulate_dtype(result.loss)
        )
        self._weight = self._weight + result.weight
        for name, value in result.metrics.items():
            self._metrics[name] = to_accumulate_dtype(value) + self._metrics.get(name, 0.0)

    def read(self, last: StepResult) -> tuple[float, Mapping[str, float], float, float]:
        """Loss sum, metric sums, weight and the last step's gradient norm, in one host read."""
        assert self._loss is not None
        values = torch.stack([self._loss, to_accumulate_dtype(last.grad_norm), *self._metrics.values()]).tolist()
        metrics = dict(zip(self._metrics, values[2:], strict=True))
        return values[0], metrics, float(self._weight), values[1]
