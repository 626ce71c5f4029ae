"""The learning rate as a pure function of the step.

Owns the curves. Refuses to know epochs, batches and units: the plan has turned them into steps. Invariant: no state;
any step may be asked for in any order.

Steps count from 0. Warm-up over W steps is linear and ends at the peak: step s has peak x (s + 1) / W, so step 0
already learns and step W - 1 is the peak. Curves that run to the end (cosine, linear, polynomial) are measured from
the end of warm-up: the share gone at step s of T is (s - W) / (T - W), so step W is the peak and only step T, which
is never taken, would be the end value. `step` and `milestones` count from step 0, as their papers do; `exponential`
counts epochs, with their fractions, from the end of warm-up.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from reconv.recipe.plan import SchedulePlan


def learning_rate(plan: SchedulePlan, step: int) -> float:
    """The rate for the optimizer step with this index."""
    if step < plan.warmup_steps:
        return plan.peak_lr * (step + 1) / plan.warmup_steps
    return _CURVES[plan.kind](plan, step)


def _gone(plan: SchedulePlan, step: int) -> float:
    """The share of the way from the end of warm-up to the end of the run, at most 1."""
    left = plan.total_steps - plan.warmup_steps
    return min(1.0, (step - plan.warmup_steps) / left) if left > 0 else 1.0


def _between(plan: SchedulePlan, share: float) -> float:
    """The rate at a share of the height between the end value (0) and the peak (1)."""
    return plan.end_lr + (plan.peak_lr - plan.end_lr) * share


def _constant(plan: SchedulePlan, step: int) -> float:
    return plan.peak_lr


def _cosine(plan: SchedulePlan, step: int) -> float:
    return _between(plan, 0.5 * (1 + math.cos(math.pi * _gone(plan, step))))


def _linear(plan: SchedulePlan, step: int) -> float:
    return _between(plan, 1 - _gone(plan, step))


def _polynomial(plan: SchedulePlan, step: int) -> float:
    return _between(plan, (1 - _gone(plan, step)) ** plan.power)


def _step(plan: SchedulePlan, step: int) -> float:
    assert plan.period_steps is not None, "the recipe demands a period"
    return float(plan.peak_lr * plan.factor ** int(step // plan.period_steps))


def _milestones(plan: SchedulePlan, step: int) -> float:
    passed = sum(step >= milestone for milestone in plan.milestone_steps)
    return float(plan.peak_lr * plan.factor**passed)


def _exponential(plan: SchedulePlan, step: int) -> float:
    return float(plan.peak_lr * plan.factor ** ((step - plan.warmup_steps) / plan.steps_per_epoch))


_CURVES: Mapping[str, Callable[[SchedulePlan, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
    "milestones": _milestones,
    "exponential": _exponential,
    "polynomial": _polynomial,
}
