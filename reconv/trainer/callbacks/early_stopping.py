"""Early stopping: end a run when a metric reaches its target or stops improving.

The decision depends only on the evaluations so far, so a resumed run stops where an uninterrupted one does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from reconv.recipe.parts.evaluation import EarlyStoppingConfig
from reconv.trainer.callbacks.base import TrainerCallback

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer


@dataclass(frozen=True, slots=True)
class EarlyStopping(TrainerCallback):
    """Stops at a target value, or after `patience` evaluations without improvement; None: never."""

    target: float | None = None
    patience: int | None = None

    @classmethod
    def from_config(cls, config: EarlyStoppingConfig) -> EarlyStopping:
        return cls(
            None if config.target == "off" else config.target, None if config.patience == "off" else config.patience
        )

    def on_fit_start(self, trainer: Trainer) -> None:
        self.on_evaluate_end(trainer)

    def on_evaluate_end(self, trainer: Trainer) -> None:
        counters, evaluator = trainer.counters, trainer.evaluator
        if counters.step < trainer.plan.total_steps and counters.evaluated_at(counters.step):
            values = counters.values(evaluator.metric, evaluator.monitored_weights)
            trainer.stop_reason = trainer.stop_reason or self.reason(evaluator.metric, values)

    def reason(self, metric: str, values: Sequence[float]) -> str:
        """Reason to stop now after these evaluations, in order; empty if there is none."""
        if not values:
            return ""
        best = max(values)
        if self.target is not None and best >= self.target:
            return f"{metric} {best:.4f} reached early_stopping.target {self.target:g}"
        num_worse = len(values) - 1 - list(values).index(best)
        if self.patience is not None and num_worse >= self.patience:
            return (
                f"{num_worse} evaluations no better than {metric} {best:.4f} (early_stopping.patience {self.patience})"
            )
        return ""
