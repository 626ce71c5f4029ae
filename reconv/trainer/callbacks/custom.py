"""Callbacks that users write: `reconv.Callback`, what it receives about the run, and how the trainer calls it.

Rank 0 calls the hooks; what they ask for is agreed on with the other ranks at once, so that a run on several ranks
stops at the same step as on one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from reconv.core.batch import Batch
from reconv.core.custom_code import build_object, code_errors, load_object
from reconv.core.errors import UsageError
from reconv.logging.events import CheckpointSaved, Event, ScalarLogged, TrainProgress
from reconv.logging.run_logger import RunLogger
from reconv.recipe.parts.code import CodeConfig
from reconv.recipe.schema import Recipe
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.run import TrainingRun

_STOP = "stop_reason"


@dataclass(slots=True)
class RunInfo:
    """A run as its callbacks see it."""

    recipe: Recipe
    folder: Path  # the run directory
    total_steps: int
    steps_per_epoch: float
    step: int = 0  # steps done
    # Of the last evaluation, of the EMA weights if there are any; then loss, lr and metrics of the last log line.
    metrics: Mapping[str, float] = field(default_factory=dict)
    progress: Mapping[str, float] = field(default_factory=dict)
    checkpoint: Path | None = None  # the last one that is complete
    stop_reason: str = ""
    _logger: RunLogger = field(default_factory=RunLogger)

    @property
    def epoch(self) -> float:
        return self.step / self.steps_per_epoch

    def log(self, name: str, value: float) -> None:
        """Log a number at this step: to the event log, the exporters and a chart of the report."""
        if not isinstance(name, str) or not name:
            raise UsageError(f"log takes the name of a value, not {name!r}")
        self._logger.log(ScalarLogged(self.step, name, float(value)))

    def request_stop(self, reason: str) -> None:
        """End the run after this step, with a checkpoint, as if it were complete."""
        self.stop_reason = self.stop_reason or reason or "requested by a callback"


class Callback:
    """Override what is needed; rank 0 calls it.

    A callback that keeps something between calls returns it from `state_dict`, as JSON data, so that a resumed run
    continues exactly.
    """

    def on_step_end(self, run: RunInfo) -> None:
        """After every step, which the device may still be working on."""

    def on_evaluate(self, run: RunInfo) -> None:
        """After an evaluation; its metrics are `run.metrics`."""

    def on_save(self, run: RunInfo) -> None:
        """Called when a checkpoint is complete on disk, perhaps some steps after its own; it is `run.checkpoint`."""

    def on_end(self, run: RunInfo) -> None:
        """At the end of training; not after an error or a stop signal."""

    def state_dict(self) -> dict[str, Any]:
        """State of this callback for checkpoints, as JSON data."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from what `state_dict` returned."""


def check_callbacks(recipe: Recipe) -> None:
    """Refuse what is not a callback, before there is a run directory."""
    for config in recipe.callbacks:
        found = load_object(config.name)
        if not (isinstance(found, Callback) or (isinstance(found, type) and issubclass(found, Callback))):
            raise UsageError(
                f"{config.name} is not a callback",
                where="callbacks",
                why=f"it is {found!r}",
                hint="derive its class from reconv.Callback",
            )


class CustomCallbacks(TrainerCallback):
    """Calls the user's callbacks."""

    def __init__(self, run: TrainingRun, configs: Sequence[CodeConfig], state: Mapping[str, Any]) -> None:
        """`state` is what a checkpoint has of them, or empty."""
        self._process_group = run.process_group
        self._info = RunInfo(
            run.recipe,
            run.run_dir.path,
            run.plan.total_steps,
            run.plan.steps_per_epoch,
            step=run.restore_point.step,
            stop_reason=state.get(_STOP, ""),
            _logger=run.logger,
        )
        built = [build_object(config.name, config.options, "a callback") for config in configs]
        names = [f"{number} {config.name}" for number, config in enumerate(configs)]
        self._callbacks: dict[str, Callback] = dict(zip(names, built, strict=True))
        self._has_step_end = any(type(callback).on_step_end is not Callback.on_step_end for callback in built)
        self._load(state)
        if run.process_group.is_rank0:
            run.logger.subscribe(self._on_event)

    def _load(self, state: Mapping[str, Any]) -> None:
        for name, callback in self._callbacks.items():
            if name in state:
                with code_errors(f"load_state_dict of {name}"):
                    callback.load_state_dict(state[name])

    def on_rollback(self, trainer: Trainer) -> None:
        self._info.step, self._info.stop_reason = trainer.counters.step, ""
        self._load(trainer.counters.callbacks)
        self._set_metrics(trainer)

    def on_fit_start(self, trainer: Trainer) -> None:
        trainer.stop_reason = trainer.stop_reason or self._info.stop_reason
        self._set_metrics(trainer)

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        self._info.step = step + 1
        if self._has_step_end:
            self._call_on_rank0(trainer, "on_step_end")

    def on_evaluate_end(self, trainer: Trainer) -> None:
        self._set_metrics(trainer)
        self._call_on_rank0(trainer, "on_evaluate")

    def on_save_start(self, trainer: Trainer) -> None:
        """Put the state of the callbacks where the checkpoint takes it from."""
        if self._process_group.is_rank0:
            trainer.counters.callbacks = self._state_dict()

    def on_fit_end(self, trainer: Trainer) -> None:
        self._call_on_rank0(trainer, "on_end")

    def _call_on_rank0(self, trainer: Trainer, hook: str) -> None:
        """Call a hook on rank 0; all ranks learn whether it asked to stop, or raise its error."""

        def call() -> str:
            self._call(hook)
            return self._info.stop_reason

        self._info.stop_reason = self._process_group.on_rank0(call)
        trainer.stop_reason = trainer.stop_reason or self._info.stop_reason

    def _call(self, hook: str) -> None:
        for name, callback in self._callbacks.items():
            with code_errors(f"{hook} of {name.partition(' ')[2]}"):
                getattr(callback, hook)(self._info)

    def _on_event(self, event: Event) -> None:
        if isinstance(event, TrainProgress):
            self._info.progress = {"loss": event.loss, "lr": event.lr, **event.metrics}
        elif isinstance(event, CheckpointSaved):
            self._info.checkpoint = self._info.folder / event.path
            self._call("on_save")

    def _set_metrics(self, trainer: Trainer) -> None:
        weights = trainer.evaluator.monitored_weights
        found = [entry["metrics"] for entry in trainer.counters.history if entry["weights"] == weights]
        self._info.metrics = dict(found[-1]) if found else {}

    def _state_dict(self) -> dict[str, Any]:
        states: dict[str, Any] = {_STOP: self._info.stop_reason} if self._info.stop_reason else {}
        for name, callback in self._callbacks.items():
            with code_errors(f"state_dict of {name.partition(' ')[2]}"):
                state = callback.state_dict()
                states |= {name: json.loads(json.dumps(state, allow_nan=False))} if state else {}
        return states
