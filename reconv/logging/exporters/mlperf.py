"""`mlperf.log`: the run as `:::MLLOG` lines, the format of MLPerf training results.

Starts and stops alternate, timestamps never decrease, and a run has one `run_start` and finally one `run_stop` with a
status. Lines about the submission (division, organization, platform) are up to the submitter.

Epochs are not events: an epoch ends at the first training event or evaluation at or after its end, which is exact
if one of them falls on the end of an epoch.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any

from reconv.core.errors import ExitCode
from reconv.logging.events import AttemptStarted, EvalFinished, Event, RunEnded, RunPlanned, TrainProgress
from reconv.logging.exporters.base import ExportedRun
from reconv.recipe.parts.optimizer import OptimizerConfig
from reconv.storage.files import write_atomic

_START, _STOP, _POINT = "INTERVAL_START", "INTERVAL_END", "POINT_IN_TIME"
_EPOCH_SLACK = 1e-9  # rounding error of steps / steps_per_epoch


class MlperfExporter:
    """Writes the MLPerf log: rebuilds it at the start of an attempt, then appends lines."""

    def __init__(self, run: ExportedRun) -> None:
        self._path = run.run_dir / "mlperf.log"
        self._recipe = run.recipe
        self._metric = run.metric
        self._target = _target(run)
        self._weights = "ema" if run.recipe.ema.decay > 0 else "raw"
        self._is_running = False
        self._epochs_done = 0
        self._is_in_epoch = False
        self._total_epochs = math.inf
        self._last_ms = 0
        self._is_reached = False
        past = [e for e in run.kept() if isinstance(e, TrainProgress | EvalFinished)]
        first_plan = next((e for e in run.past if isinstance(e, RunPlanned)), None)
        begin = [run.first_attempt, first_plan] if run.past else []
        lines = [line for event in (*begin, *past) if event is not None for line in self._lines(event)]
        write_atomic(self._path, "".join(lines))

    def on_event(self, event: Event) -> None:
        lines = "".join(self._lines(event))
        if lines:
            with self._path.open("a", encoding="utf-8") as file:
                file.write(lines)

    def close(self) -> None:
        """Nothing to do: lines are written as events come."""

    def _lines(self, event: Event) -> Iterator[str]:
        time_ms = round(1000 * (event.time_s or 0.0))
        match event:
            case AttemptStarted() if self._last_ms == 0:
                yield self._line(time_ms, _START, "init_start")
            case RunPlanned():
                self._total_epochs = event.total_steps / event.steps_per_epoch
                if not self._is_running:
                    self._is_running = True
                    yield from self._setup(time_ms, event)
            case TrainProgress():
                yield from self._until(event.epoch, time_ms)
            case EvalFinished() if event.weights == self._weights and not event.partial:
                start_ms = time_ms - round(1000 * event.wall_s)
                yield from self._until(event.epoch, start_ms)
                yield from self._evaluated(event, start_ms, time_ms)
            case RunEnded() if self._is_running:
                if self._is_in_epoch:
                    yield self._epoch(time_ms, _STOP)
                success = event.exit_code == ExitCode.OK and (self._target is None or self._is_reached)
                status = "success" if success else "aborted"
                about = {"status": status, "target": self._target, "target_reached": self._is_reached}
                yield self._line(time_ms, _STOP, "run_stop", None, about)

    def _setup(self, time_ms: int, plan: RunPlanned) -> Iterator[str]:
        recipe = self._recipe
        points = {
            "seed": recipe.seed,
            "global_batch_size": plan.global_batch_size,
            "opt_name": recipe.optimizer.name,
            "opt_base_learning_rate": recipe.schedule.lr,
            "opt_weight_decay": recipe.optimizer.weight_decay,
            **_momentum(recipe.optimizer),
            "opt_learning_rate_warmup": str(recipe.schedule.warmup),
            "target_accuracy": self._target,
        }
        for key, value in points.items():
            yield self._line(time_ms, _POINT, key, value)
        yield self._line(time_ms, _STOP, "init_stop")
        yield self._line(time_ms, _START, "run_start")

    def _until(self, epoch: float, time_ms: int) -> Iterator[str]:
        """The starts and stops of epochs up to an epoch and its time."""
        while self._epochs_done < min(epoch, self._total_epochs) - _EPOCH_SLACK or self._is_in_epoch:
            if not self._is_in_epoch:
                yield self._epoch(self._last_ms, _START)
            if epoch + _EPOCH_SLACK < self._epochs_done + 1:
                return
            yield self._epoch(time_ms, _STOP)

    def _epoch(self, time_ms: int, event_type: str) -> str:
        self._is_in_epoch = event_type == _START
        number = self._epochs_done + 1
        self._epochs_done += event_type == _STOP
        key = "epoch_start" if event_type == _START else "epoch_stop"
        return self._line(time_ms, event_type, key, None, {"epoch_num": number})

    def _evaluated(self, event: EvalFinished, start_ms: int, time_ms: int) -> Iterator[str]:
        about = {"epoch_num": event.epoch, "step": event.step}
        yield self._line(start_ms, _START, "eval_start", None, about)
        if self._metric in event.metrics:
            value = event.metrics[self._metric]
            self._is_reached |= self._target is not None and value >= self._target
            yield self._line(time_ms, _POINT, "eval_accuracy", value, about)
        yield self._line(time_ms, _STOP, "eval_stop", None, about)

    def _line(
        self, time_ms: int, event_type: str, key: str, value: Any = None, metadata: Mapping[str, Any] | None = None
    ) -> str:
        self._last_ms = max(self._last_ms, time_ms)
        record = {
            "namespace": "",
            "time_ms": self._last_ms,
            "event_type": event_type,
            "key": key,
            "value": None if isinstance(value, float) and not math.isfinite(value) else value,
            "metadata": metadata or {},
        }
        return f":::MLLOG {json.dumps(record, allow_nan=False, ensure_ascii=False)}\n"


def _momentum(optimizer: OptimizerConfig) -> dict[str, float]:
    """The smoothing constants of the optimizer, by MLPerf's names."""
    if optimizer.name not in ("adamw", "lamb"):
        return {"opt_momentum": optimizer.momentum}
    return {f"opt_{optimizer.name}_beta_{i}": beta for i, beta in enumerate(optimizer.betas, start=1)}


def _target(run: ExportedRun) -> float | None:
    """The accuracy a run must reach: its early stopping target, else the lowest value its recipe expects."""
    recipe = run.recipe
    if recipe.early_stopping.target != "off":
        return float(recipe.early_stopping.target)
    return None if recipe.expect is None else recipe.expect.value - recipe.expect.tolerance
