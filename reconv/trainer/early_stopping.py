"""Ending a run before its length: by a target, or when evaluations stop getting better.

Owns the two rules. Refuses to know what is measured. Invariant: a pure function of the evaluations so far, so a
resumed run ends where the run left alone does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EarlyStopping:
    """When to end; None: never for that reason."""

    target: float | None = None
    patience: int | None = None  # evaluations

    def reason(self, metric: str, values: Sequence[float]) -> str:
        """Why a run with these evaluations, in order, should end now; empty: it should not."""
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
