"""Learning rate range test: a run in a temporary folder whose rate rises exponentially until the loss diverges.

The loss is smoothed by an exponential moving average (0.9, bias-corrected). It has diverged where, after its lowest
point, it is a tenth above its start or not finite. The suggestion is the middle of the half decade before the lowest
point in which it falls fastest per factor of the rate (L. N. Smith, arXiv:1506.01186, for the test; the steepest slope
is fastai's rule). Nothing is left of the run but the result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from reconv.core.custom_code import code_errors
from reconv.core.errors import DivergedError
from reconv.core.message import message
from reconv.logging import formatting as fmt
from reconv.logging.events import Event, TrainProgress
from reconv.recipe.parts.schedule import SchedulePlan
from reconv.recipe.plan import Every
from reconv.storage.temporary_folder import temporary_folder
from reconv.trainer.dry_run import SHORT_RUN
from reconv.trainer.options import RunOptions
from reconv.trainer.run import TrainingRun

RULE = "the middle of the half decade in which the smoothed loss falls fastest"
_BELOW, _ABOVE = 1000.0, 100.0  # of the recipe's own rate
_SMOOTHING = 0.9
_WINDOW_DECADES = 0.5
_FEWEST = 5  # steps of a window
_DIVERGED = 1.1  # times its start
_FALL = 0.05  # of the loss, at least, for a suggestion


@message
@dataclass(frozen=True, slots=True)
class LrRange:
    """The loss by learning rate, and what follows from it."""

    recipe: str
    recipe_lr: float
    lrs: tuple[float, ...]  # by step
    losses: tuple[float, ...]
    smoothed: tuple[float, ...]
    suggestion: float | None  # None: the loss never falls
    lowest: float | None  # the rate at the lowest smoothed loss
    diverged: float | None  # the first rate at which it has diverged; None: it has not

    @property
    def lines(self) -> list[str]:
        """The result for people."""
        lines = [f"the recipe's rate: {self.recipe_lr:g}"]
        if self.suggestion is None:
            lines.append("no suggestion: the loss does not fall at any of these rates")
        else:
            lines.append(f"suggested: {self.suggestion:.2g} ({RULE})")
        if self.lowest is not None:
            lines.append(f"lowest loss at {self.lowest:.2g}")
        end = "does not diverge" if self.diverged is None else f"diverges at {self.diverged:.2g}"
        lines.append(f"it {end}, of {self.lrs[0]:.2g} to {self.lrs[-1]:.2g} tried")
        return lines

    @property
    def rows(self) -> tuple[list[str], list[list[str]]]:
        """Two rates a decade, as a table."""
        shown: list[list[str]] = []
        last = -math.inf
        for lr, loss, smooth in zip(self.lrs, self.losses, self.smoothed, strict=True):
            if math.log10(lr) - last >= _WINDOW_DECADES - 1e-9:
                last = math.log10(lr)
                shown.append([f"{lr:.3g}", fmt.number(loss), fmt.number(smooth)])
        return ["rate", "loss", "smoothed"], shown

    def to_dict(self) -> dict[str, Any]:
        """The result as plain data; losses that are not finite are None."""

        def finite(values: Sequence[float]) -> list[float | None]:
            return [value if math.isfinite(value) else None for value in values]

        return {
            "recipe": self.recipe,
            "recipe_lr": self.recipe_lr,
            "suggestion": self.suggestion,
            "rule": RULE,
            "lowest": self.lowest,
            "diverged": self.diverged,
            "lrs": list(self.lrs),
            "losses": finite(self.losses),
            "smoothed": finite(self.smoothed),
        }


def find_lr_range(options: RunOptions, steps: int) -> LrRange:
    """Train so many steps with a rate from a thousandth to a hundred times the recipe's; nothing is kept."""
    losses: list[float] = []
    overrides = [*options.overrides, *SHORT_RUN, ("engine.divergence.policy", "ignore", "--lr-range")]
    with temporary_folder("lr-range") as folder:
        args = replace(options, overrides=overrides, out=folder / "run")
        stop = _StopWhenDiverged(losses)
        with TrainingRun.from_args(args, stop) as run:
            low = run.plan.schedule.peak_lr / _BELOW
            factor = (_BELOW * _ABOVE) ** (1 / (steps - 1))
            trainer = _rising(run, low, factor, steps).trainer()
            stop.trainer = trainer
            try:
                with code_errors():
                    trainer.fit()
            except DivergedError:  # a loss or gradient that is not finite: the weights stay
                losses.append(math.inf)
            recipe, peak = run.recipe.name, run.plan.schedule.peak_lr
    return analyze(recipe, peak, [low * factor**step for step in range(len(losses))], losses)


class _StopWhenDiverged:
    """Collects the loss of each step, and ends the run soon after it has diverged."""

    def __init__(self, losses: list[float]) -> None:
        self._losses = losses
        self.trainer: Any = None

    def __call__(self, event: Event) -> None:
        if isinstance(event, TrainProgress):
            self._losses.append(event.loss)
            start = self._losses[0]
            if self.trainer is not None and len(self._losses) > _FEWEST and min(self._losses[-_FEWEST:]) > 4 * start:
                self.trainer.stop_reason = "the loss has diverged"


def _rising(run: TrainingRun, low: float, factor: float, steps: int) -> TrainingRun:
    """The run with a rate that rises by a factor at every step, all parameters trained, and nothing saved."""
    per_epoch = run.plan.steps_per_epoch
    schedule = SchedulePlan("exponential", low, 0.0, steps, per_epoch, 0, gamma=factor**per_epoch)
    plan = replace(
        run.plan,
        schedule=schedule,
        total_steps=steps,
        log=Every(steps=1),
        evaluate=None,
        save=None,
        keep_steps=(),
        average=None,
        freeze_steps=0,
    )
    return replace(run, plan=plan)


def analyze(recipe: str, recipe_lr: float, lrs: Sequence[float], losses: Sequence[float]) -> LrRange:
    """The result of the losses at rising rates."""
    smoothed = smooth(losses)
    finite = [n for n, value in enumerate(smoothed) if math.isfinite(value)]
    lowest = min(finite, key=lambda n: (smoothed[n], n), default=None)
    diverged = None
    if lowest is not None:
        after = range(lowest + 1, len(smoothed))
        diverged = next((n for n in after if not smoothed[n] <= _DIVERGED * smoothed[0]), None)  # also NaN
    found = None if lowest is None else _steepest(lrs, smoothed, lowest)
    return LrRange(
        recipe,
        recipe_lr,
        tuple(lrs),
        tuple(losses),
        tuple(smoothed),
        found,
        None if lowest is None else lrs[lowest],
        None if diverged is None else lrs[diverged],
    )


def smooth(values: Sequence[float]) -> list[float]:
    """An exponential moving average, corrected for its start at zero."""
    smoothed, average = [], 0.0
    for number, value in enumerate(values, 1):
        average = _SMOOTHING * average + (1 - _SMOOTHING) * value
        smoothed.append(average / (1 - _SMOOTHING**number))
    return smoothed


def _steepest(lrs: Sequence[float], smoothed: Sequence[float], lowest: int) -> float | None:
    """The rate in the middle of the half decade in which the loss falls fastest, up to the lowest point."""
    if smoothed[lowest] > (1 - _FALL) * smoothed[0]:
        return None
    decades = [math.log10(lr) for lr in lrs]
    best: tuple[float, float] | None = None
    for first in range(lowest):
        last = next((n for n in range(first, lowest + 1) if decades[n] - decades[first] >= _WINDOW_DECADES), lowest)
        if last - first + 1 < _FEWEST:
            break
        slope = _slope(decades[first : last + 1], smoothed[first : last + 1])
        if best is None or slope < best[0]:
            best = (slope, 10 ** ((decades[first] + decades[last]) / 2))
    return best[1] if best is not None and best[0] < 0 else None


def _slope(x: Sequence[float], y: Sequence[float]) -> float:
    """The slope of the least-squares line."""
    mean_x, mean_y = sum(x) / len(x), sum(y) / len(y)
    spread = sum((a - mean_x) ** 2 for a in x)
    return sum((a - mean_x) * (b - mean_y) for a, b in zip(x, y, strict=True)) / spread
