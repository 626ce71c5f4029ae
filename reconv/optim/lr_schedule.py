"""Learning rate schedules: the learning rate as a pure function of the step.

Steps count from 0, and the plan has converted all durations to steps. Warm-up over W steps is linear. With
`warmup_from: first`, step s has peak * (s + 1) / W, so that step W - 1 has the peak; with `zero`, peak * s / W. With
`interval: epoch` the rate is that of the epoch's first step, and warm-up counts epochs: (e + 1) / W or e / W.

`warmup_mode` says where a schedule starts: `prefix`, after the warm-up; `replace`, at step 0, so that the rate may jump
at the end of the warm-up; `multiply`, at step 0, multiplied by the warm-up. Cosine, linear and polynomial schedules
reach their end value at step H, by default the number of steps T of the run, which is one past the last: their progress
at step s is (s - W) / (H - W), or s / H. `step`, `multistep` and `piecewise` always count from step 0.

`one-cycle` rises from the start value at step 0 to the peak at step W - 1 and falls to the end value at the last step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from reconv.recipe.plan import SchedulePlan


@dataclass(slots=True)
class LrSchedule:
    """The learning rate of a run by step: that of its plan, times a factor that rewinds make smaller."""

    plan: SchedulePlan
    factor: float = 1.0

    def __call__(self, step: int) -> float:
        return learning_rate(self.plan, step) * self.factor


def learning_rate(plan: SchedulePlan, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    at = step - step % plan.tick_steps
    if plan.name == "one-cycle":
        return _one_cycle(plan, at)
    if at >= plan.warmup_steps:
        return _SCHEDULES[plan.name](plan, at)
    peak = _SCHEDULES[plan.name](plan, at) if plan.warmup_mode == "multiply" else plan.peak_lr
    warmed_up = at if plan.warmup_from == "zero" else min(at + plan.tick_steps, plan.warmup_steps)
    return peak * warmed_up / plan.warmup_steps


def _first_step(plan: SchedulePlan) -> int:
    return plan.warmup_steps if plan.warmup_mode == "prefix" else 0


def _progress(plan: SchedulePlan, step: int) -> float:
    """Progress of a schedule between its first step (0) and its end (1)."""
    end = plan.total_steps if plan.end_steps is None else plan.end_steps
    length = end - _first_step(plan)
    return min(1.0, (step - _first_step(plan)) / length) if length > 0 else 1.0


def _interpolate(plan: SchedulePlan, factor: float) -> float:
    """The learning rate between the end value (factor 0) and the peak (factor 1)."""
    return plan.end_lr + (plan.peak_lr - plan.end_lr) * factor


def _constant(plan: SchedulePlan, step: int) -> float:
    return plan.peak_lr


def _cosine(plan: SchedulePlan, step: int) -> float:
    return _interpolate(plan, 0.5 * (1 + math.cos(math.pi * _progress(plan, step))))


def _linear(plan: SchedulePlan, step: int) -> float:
    return _interpolate(plan, 1 - _progress(plan, step))


def _polynomial(plan: SchedulePlan, step: int) -> float:
    return _interpolate(plan, (1 - _progress(plan, step)) ** plan.power)


def _step(plan: SchedulePlan, step: int) -> float:
    assert plan.period_steps is not None, "the recipe requires a period"
    return float(plan.peak_lr * plan.gamma ** int(step // plan.period_steps))


def _multistep(plan: SchedulePlan, step: int) -> float:
    return float(plan.peak_lr * plan.gamma ** _num_milestones(plan, step))


def _piecewise(plan: SchedulePlan, step: int) -> float:
    return (plan.peak_lr, *plan.milestone_lrs)[_num_milestones(plan, step)]


def _num_milestones(plan: SchedulePlan, step: int) -> int:
    """The number of milestones up to a step."""
    return sum(step >= milestone for milestone in plan.milestone_steps)


def _exponential(plan: SchedulePlan, step: int) -> float:
    since = step - _first_step(plan)
    if plan.staircase:  # whole periods
        periods: float = int(since // (plan.period_steps or int(plan.steps_per_epoch)))
    else:
        periods = since / float(plan.period_steps or plan.steps_per_epoch)
    return float(plan.peak_lr * plan.gamma**periods)


def _one_cycle(plan: SchedulePlan, step: int) -> float:
    peak, last = plan.warmup_steps - 1, plan.total_steps - 1
    if step == peak:
        return plan.peak_lr
    if step < peak:
        return _anneal(plan, plan.start_lr, plan.peak_lr, step / peak)
    return _anneal(plan, plan.peak_lr, plan.end_lr, min(1.0, (step - peak) / (last - peak)) if last > peak else 1.0)


def _anneal(plan: SchedulePlan, start: float, end: float, progress: float) -> float:
    factor = progress if plan.anneal_strategy == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
    return start + (end - start) * factor


_SCHEDULES: Mapping[str, Callable[[SchedulePlan, int], float]] = {
    "constant": _constant,
    "cosine": _cosine,
    "linear": _linear,
    "step": _step,
    "multistep": _multistep,
    "piecewise": _piecewise,
    "exponential": _exponential,
    "polynomial": _polynomial,
}
