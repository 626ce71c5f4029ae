"""Detection of training that diverges with finite numbers: a loss above its start, or a metric that collapses.

Decisions are taken at fixed steps from losses of the steps before, which checkpoints store, so that a resumed run takes
the same ones at the same steps.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

from reconv.checkpoint.best import best_evaluation
from reconv.core.batch import Batch
from reconv.core.errors import DivergedError
from reconv.core.text import printable_lines
from reconv.logging.formatting import fork_command, metric_name, metric_text, number
from reconv.recipe.parts.schedule import learning_rate
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.step import StepResult

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer

_WINDOW_STEPS = (20, 200)  # at least and at most; half an epoch in between
_LOSS_MARGIN = 0.1  # of the loss at the start: large steps of a healthy run overshoot by a few percent
_NUM_ERRORS = 3.0  # standard errors of the mean loss
_NUM_METRIC_ERRORS = 4.0  # of the difference of two accuracies
_LOST_FRACTION = 0.5  # of what the best evaluation has above chance; high rates alone cost a tenth between epochs


class DivergenceGuard(TrainerCallback):
    """Warns, stops the run or asks for a rewind when training diverges."""

    def __init__(self, recipe: Recipe, plan: Plan, run_dir: Path, state: dict[str, Any]) -> None:
        self._config = recipe.engine.divergence
        self._recipe, self._plan, self._run_dir = recipe, plan, run_dir
        self._window = window_steps(plan)
        self._load(state)

    def _load(self, state: dict[str, Any]) -> None:
        self._start: float | None = state.get("start")  # the loss of the first step, or of guessing
        self._first_step: int = state.get("first_step", 0)  # losses of earlier steps are not counted
        self._losses: list[tuple[int, float | None]] = [tuple(pair) for pair in state.get("losses", [])]
        self._warned: set[str] = set(state.get("warned", []))
        self._num_rewinds: int = state.get("num_rewinds", 0)

    @property
    def replaces_nan_guard(self) -> bool:
        """True if steps that are not finite lead to a rewind instead of ending the run."""
        return self._config.policy == "rewind"

    def add_loss(self, step: int, loss: float, ok: bool) -> None:
        """Count the mean loss of a step; one that was not applied is not finite."""
        if self._config.policy == "ignore" or step < self._first_step:
            return
        if self._start is None and ok:
            self._start = max(loss, _chance_loss(self._recipe, self._plan))
        self._losses.append((step, loss if ok else None))

    def on_step_end(self, trainer: Trainer, step: int, result: StepResult, micro_batches: Sequence[Batch]) -> None:
        if step == 0 or step % self._window:
            return
        # The loss of this step may be known or not yet: it counts for the next window.
        window = [loss for at, loss in self._losses if step - self._window <= at < step]
        self._losses = [(at, loss) for at, loss in self._losses if at >= step]
        if self._start is None or len(window) < self._window:
            return
        if not exceeds_start(window, self._start):
            self._warned.discard("loss")
            return
        finite = [loss for loss in window if loss is not None]
        mean = number(fmean(finite)) if finite else "not finite"
        what = f"the training loss is {mean} in steps {step - self._window + 1:,} to {step:,}"
        self._react(trainer, "loss", f"{what}, above the {number(self._start)} of the start", self._cause(step))

    def on_evaluate_end(self, trainer: Trainer) -> None:
        if self._config.policy == "ignore" or not trainer.counters.evaluated_at(trainer.counters.step):
            return
        metric, weights = trainer.evaluator.metric, trainer.evaluator.monitored_weights
        *before, now = trainer.counters.values(metric, weights) or [math.nan]
        best = max((value for value in before if not math.isnan(value)), default=math.nan)
        if not has_collapsed(best, now, self._chance(metric), self._plan.num_val):
            self._warned.discard("metric")
            return
        texts = [metric_text(metric, value) for value in (now, best)]
        what = f"{metric_name(metric)} of the validation set fell to {texts[0]}, from {texts[1]} at its best"
        self._react(trainer, "metric", what, self._cause(trainer.counters.step))

    def on_rollback(self, trainer: Trainer) -> None:
        self._load(trainer.counters.divergence)

    def on_save_start(self, trainer: Trainer) -> None:
        state = {"start": self._start, "losses": self._losses}
        counts = {"first_step": self._first_step, "num_rewinds": self._num_rewinds, "warned": sorted(self._warned)}
        trainer.counters.divergence |= {**state, **counts}

    def _react(self, trainer: Trainer, kind: str, what: str, why: str) -> None:
        step = trainer.counters.step
        is_last = step >= trainer.plan.total_steps - 1
        if self._config.policy == "rewind" and not is_last:
            is_spent = self._num_rewinds == self._config.max_rewinds
            if is_spent or self._useful_step(trainer) is None:
                why = f"after {self._num_rewinds} rewinds (engine.divergence.max_rewinds): {why}" if is_spent else why
                raise DivergedError(what, why=why, hint=self._command(trainer))
            self._num_rewinds += 1
            self._losses, self._first_step = [], step + (kind == "loss")  # the counter is behind at the end of a step
            trainer.rewind_reason = f"{what}; likely cause: {why}"
            return
        if self._config.policy == "stop":
            raise DivergedError(what, why=why, hint=self._command(trainer))
        if kind not in self._warned:
            self._warned.add(kind)
            lines = what, f"  likely cause: {why}", f"  hint: {self._command(trainer)}"
            trainer.logger.warning(printable_lines(*lines), step)

    def _cause(self, step: int) -> str:
        plan, rate = self._plan, number(learning_rate(self._plan.schedule, max(0, step - 1)))
        since_unfrozen = step - plan.freeze_steps
        if plan.freeze_steps and 0 <= since_unfrozen <= max(2 * plan.steps_per_epoch, self._window):
            return f"the rate {rate} is too high since the backbone is trained, from step {plan.freeze_steps:,} on"
        if "loss" not in self._warned and self._losses and step % self._window and self._loss_is_low():
            return "the training loss is low: batch norm's running statistics do not fit, or the validation set differs"
        return f"the learning rate is too high ({rate} at step {step:,})"

    def _loss_is_low(self) -> bool:
        finite = [loss for _, loss in self._losses if loss is not None]
        return self._start is not None and bool(finite) and fmean(finite) < self._start / 2

    def _command(self, trainer: Trainer) -> str:
        """Command to type: a fork of the best checkpoint, or a new run, with a smaller rate."""
        rate = self._recipe.schedule.lr * self._config.lr_factor
        step = self._useful_step(trainer)
        if step is None:
            return f"start again with a smaller rate: --lr {number(rate)}"
        command = fork_command(self._run_dir, {"schedule.lr": float(f"{rate:.4g}")}, "--best")
        return f"continue from the best checkpoint, of step {step:,}, with a smaller rate: {command}"

    def _useful_step(self, trainer: Trainer) -> int | None:
        """The step of the best checkpoint; None if there is none that is better than guessing."""
        metric, weights = trainer.evaluator.metric, trainer.evaluator.monitored_weights
        best = best_evaluation(trainer.counters.history, metric, weights)
        if best is None or self._plan.save is None or not self._recipe.save.keep_best:
            return None
        chance = self._chance(metric)
        error = math.sqrt(chance * (1 - chance) / max(1, self._plan.num_val))
        return best.step if best.value - chance > _NUM_ERRORS * error else None

    def _chance(self, metric: str) -> float:
        """The value of a metric for guesses."""
        return 1 / self._plan.num_classes if metric == "top1" else 0.0


def window_steps(plan: Plan) -> int:
    """The number of steps whose mean loss is compared with that of the start."""
    least, most = _WINDOW_STEPS
    return max(least, min(most, round(plan.steps_per_epoch / 2)))


def exceeds_start(losses: Sequence[float | None], start: float) -> bool:
    """True if the mean of losses is above that of the start by more than chance; None: a step that was not finite."""
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < max(2, len(losses) / 2):
        return True
    error = stdev(finite) / math.sqrt(len(finite))
    return fmean(finite) - _NUM_ERRORS * error > start + _LOSS_MARGIN * abs(start)


def has_collapsed(best: float, now: float, chance: float, num_samples: int) -> bool:
    """True if a metric has lost half of what it had above chance, and more than chance takes from so few samples."""
    if not (0 <= best <= 1 and chance < best and num_samples > 0):
        return False  # NaN, or not a fraction
    if math.isnan(now):
        return True
    variance = (best * (1 - best) + max(0.0, now * (1 - now))) / num_samples
    is_large = now - chance < (1 - _LOST_FRACTION) * (best - chance)
    return is_large and best - now > _NUM_METRIC_ERRORS * math.sqrt(variance)


def _chance_loss(recipe: Recipe, plan: Plan) -> float:
    """The cross-entropy of guessing; below it the loss of the first step is that of trained weights."""
    is_cross_entropy = recipe.loss.name in ("auto", "cross_entropy") and recipe.distill.teacher is None
    return math.log(plan.num_classes) if recipe.task == "classification" and is_cross_entropy else -math.inf
