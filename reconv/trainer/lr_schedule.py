"""The learning rate as a pure function of the step.

Owns the curves. Refuses to know epochs, batches and units: the plan has turned them into steps. Invariant: no state;
any step may be asked for in any order.

Steps count from 0. Warm-up over W steps is linear. `first`: step s has peak x (s + 1) / W, so step 0 already learns
and step W - 1 is the peak; `zero`: peak x s / W, so step W is the peak. A rate that moves once per epoch is that of
the epoch's first step, and its warm-up counts epochs: (e + 1) / W or e / W.

Where a curve begins: `warmup`, at the end of warm-up; `start`, at step 0, so that the rate may jump where warm-up ends;
`scaled`, at step 0, with warm-up multiplying the curve instead of replacing it. Curves that run to an end (cosine,
linear, polynomial) reach their end value at the horizon H, by default step T of a run of T steps, which is never taken:
the share gone at step s is (s - W) / (H - W), or s / H. `step`, `milestones` and `table` count from step 0 always.
A milestone counts from the first step that reaches it, or from the first that exceeds it: the plan has settled which.

`one-cycle` is a curve of its own: W steps from the start value at step 0 to the peak at step W - 1, and on to the end
value at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from reconv.recipe.plan import SchedulePlan


def learning_rate(plan: SchedulePlan, step: int) -> float:
    """The rate for the optimizer step with this index."""
    at = step - step % plan.tick_steps
    if plan.name == "one-cycle":
        return _one_cycle(plan, at)
    if at >= plan.warmup_steps:
        return _CURVES[plan.name](plan, at)
    height = _CURVES[plan.name](plan, at) if plan.warmup_mode == "multiply" else plan.peak_lr
    risen = at if plan.warmup_from == "zero" else min(at + plan.tick_steps, plan.warmup_steps)
    return height * risen / plan.warmup_steps


def _begin(plan: SchedulePlan) -> int:
    return plan.warmup_steps if plan.warmup_mode == "prefix" else 0


def _gone(plan: SchedulePlan, step: int) -> float:
    """The share of the way from where the curve begins to its horizon, at most 1."""
    end = plan.total_steps if plan.end_steps is None else plan.end_steps
    left = end - _begin(plan)
    return min(1.0, (step - _begin(plan)) / left) if left > 0 else 1.0


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
    return float(plan.peak_lr * plan.gamma ** int(step // plan.period_steps))


def _multistep(plan: SchedulePlan, step: int) -> float:
    return float(plan.peak_lr * plan.gamma ** _passed(plan, step))


def _piecewise(plan: SchedulePlan, step: int) -> float:
    return (plan.peak_lr, *plan.milestone_lrs)[_passed(plan, step)]


def _passed(plan: SchedulePlan, step: int) -> int:
    """How many milestones lie at or before a step."""
    return sum(step >= milestone for milestone in plan.milestone_steps)


def _exponential(plan: SchedulePlan, step: int) -> float:
    since = step - _begin(plan)
    if plan.staircase:  # whole periods, counted exactly
        periods: float = int(since // (plan.period_steps or int(plan.steps_per_epoch)))
    else:
        periods = since / float(plan.period_steps or plan.steps_per_epoch)
    return float(plan.peak_lr * plan.gamma**periods)


def _one_cycle(plan: SchedulePlan, step: int) -> float:
    top, last = plan.warmup_steps - 1, plan.total_steps - 1
    if step == top:
        return plan.peak_lr
    if step < top:
        return _anneal(plan, plan.start_lr, plan.peak_lr, step / top)
    return _anneal(plan, plan.peak_lr, plan.end_lr, min(1.0, (step - top) / (last - top)) if last > top else 1.0)


def _anneal(plan: SchedulePlan, first: float, second: float, gone: float) -> float:
    share = gone if plan.anneal_strategy == "linear" else 0.5 * (1 - math.cos(math.pi * gone))
    return first + (second - first) * share


_CURVES: Mapping[str, Callable[[SchedulePlan, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
    "multistep": _multistep,
    "piecewise": _piecewise,
    "exponential": _exponential,
    "polynomial": _polynomial,
}
