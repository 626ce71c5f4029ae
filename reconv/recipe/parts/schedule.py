"""The recipe section `schedule`, and each schedule: its fields, checks, text and learning rate by step.

Steps count from 0, and durations are converted to steps (`SchedulePlan`). Warm-up over W steps is linear. With
`warmup_from: first`, step s has peak * (s + 1) / W, so that step W - 1 has the peak; with `zero`, peak * s / W; with a
number f, peak * (f + (1 - f) * s / W). A constant warm-up keeps the rate of its step 0. With `interval: epoch` the rate
is that of the epoch's first step, and warm-up counts epochs: (e + 1) / W, e / W or f + (1 - f) * e / W.

`warmup_mode` is where a schedule starts: `prefix`, after the warm-up; `replace`, at step 0, so that the rate may jump
at the end of the warm-up; `multiply`, at step 0, multiplied by the warm-up. Cosine, linear and polynomial schedules
reach their end value at step H, by default the number of steps T of the run, which is one past the last: their progress
at step s is (s - W) / (H - W), or s / H.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction as ExactFraction
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, model_validator

from reconv.core.errors import RecipeError, one_of
from reconv.core.text import count
from reconv.recipe.parts.contradiction import Contradiction, join_words
from reconv.recipe.units import (
    Duration,
    Fraction,
    Listed,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    duration_steps,
    exact_steps,
    parse_rate,
    split_rate,
)

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


def _plain_rate(value: object) -> object:
    """`2^-3` as a number. A rate with its batch size was split before, unless base_batch_size is given and differs."""
    if not isinstance(value, str) or not ("^" in value or "per" in value):
        return value
    parsed = parse_rate(value)
    if parsed is None:
        raise ValueError("a number, also as in 2^-11 per image or 0.256 per 256")
    if parsed[1] is not None:
        raise ValueError("a rate without `per`; schedule.base_batch_size is the batch size of all rates")
    return parsed[0]


Rate = Annotated[PositiveFloat, BeforeValidator(_plain_rate)]


class ScheduleConfig(Section):
    """The learning rate schedule, a pure function of the step."""

    name: Literal[
        "constant", "cosine", "linear", "step", "multistep", "piecewise", "exponential", "polynomial", "one-cycle"
    ] = "cosine"
    """Shape of the schedule after warm-up."""
    lr: Rate = 0.1
    """Peak learning rate, at base_batch_size if that is set; `0.256 per 256` and `2^-11 per image` set both. Written
    without `per`, it is used as it is: it does not inherit base_batch_size."""
    base_batch_size: Positive | None = None
    """Scale the learning rate linearly: lr x batch.size / base_batch_size; null uses lr as it is."""
    interval: Literal["step", "epoch"] = "step"
    """Update the learning rate every step or every epoch."""
    warmup: Duration = Duration(0, "ep")
    """Length of the warm-up."""
    warmup_from: Literal["first", "zero"] | Fraction = "first"
    """Step s of a warm-up of W steps uses the fraction (s + 1) / W (`first`) or s / W (`zero`); a number f is the
    first fraction, f + (1 - f) s / W, as start_factor of torch's LinearLR."""
    warmup_shape: Literal["linear", "constant"] = "linear"
    """Rise of the warm-up; `constant` keeps its first learning rate, as torch's ConstantLR."""
    warmup_mode: Literal["prefix", "replace", "multiply"] = "prefix"
    """`prefix` starts the schedule after warm-up; `replace` starts it at step 0 and warm-up replaces its first steps;
    `multiply` starts it at step 0 and multiplies it by warm-up."""
    end_lr: Annotated[NonNegative, BeforeValidator(_plain_rate)] = 0
    """Final learning rate of cosine, linear, polynomial and one-cycle; it is not scaled with the batch size."""
    end_lr_ratio: Fraction | None = None
    """Final learning rate as a fraction of the peak, instead of end_lr."""
    decay_until: Duration | None = None
    """Point at which cosine, linear and polynomial reach the final rate; null is the end of the run."""
    period: Duration | None = None
    """Time between two multiplications by gamma, for step and exponential; null is an epoch for exponential."""
    num_periods: Positive | None = None
    """Exponential: number of periods in the run, instead of `period`."""
    staircase: bool = False
    """Exponential: multiply once at the end of each period instead of continuously."""
    milestones: Annotated[tuple[Duration, ...], Listed] = ()
    """Points at which multistep and piecewise change the learning rate."""
    milestone_when: Literal["reached", "exceeded"] = "reached"
    """Whether a milestone takes effect at its step or one step later."""
    milestone_lrs: Annotated[tuple[Rate, ...], Listed] = ()
    """Piecewise: learning rate from each milestone on; `lr` applies before the first. Like lr, they are scaled only by
    a base_batch_size that is written with them."""
    gamma: PositiveFloat = 0.1
    """Factor of the learning rate for step, multistep and exponential."""
    power: PositiveFloat = 2
    """Exponent of polynomial."""
    start_lr_ratio: Fraction = 0.04
    """One-cycle: first learning rate as a fraction of the peak."""
    anneal_strategy: Literal["cosine", "linear"] = "cosine"
    """One-cycle: shape of the rise and of the fall."""

    @property
    def uses_lr(self) -> bool:
        """True if any step uses lr: not where piecewise starts at step 0 and no warm-up leads to lr."""
        if self.name != "piecewise" or not self.milestones:
            return True
        from_start = self.milestones[0].value == 0 and self.milestone_when == "reached"
        return not from_start or (self.warmup.value > 0 and self.warmup_mode != "multiply")

    @model_validator(mode="before")
    @classmethod
    def _split_rate(cls, given: Any) -> Any:
        """`lr: 2^-11 per image` sets lr and base_batch_size."""
        return split_rate(given) if isinstance(given, Mapping) else given


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The schedule with all durations in steps and scaled learning rates."""

    name: str
    peak_lr: float
    end_lr: float
    total_steps: int
    steps_per_epoch: float
    warmup_steps: int
    period_steps: ExactFraction | None = None
    milestone_steps: tuple[int, ...] = ()
    gamma: float = 0.1
    power: float = 2.0
    tick_steps: int = 1  # steps between updates of the learning rate: 1 or an epoch
    warmup_from: str | float = "first"
    warmup_shape: str = "linear"
    warmup_mode: str = "prefix"
    end_steps: int | None = None  # where decaying schedules end; None: total_steps
    milestone_lrs: tuple[float, ...] = ()  # piecewise: learning rate from each milestone on
    staircase: bool = False
    start_lr: float = 0.0  # one-cycle
    anneal_strategy: str = "cosine"


_COMMON = ("name", "lr", "base_batch_size", "warmup")
_WITH_WARMUP = (*_COMMON, "interval", "warmup_from", "warmup_shape")
_DECAYING = (*_WITH_WARMUP, "warmup_mode", "end_lr", "end_lr_ratio", "decay_until")


class Schedule:
    """A shape of the learning rate after warm-up; `name` of the section is its key in `SCHEDULES`."""

    fields: ClassVar[tuple[str, ...]]  # of the section that it uses; others must be at their default
    counts_from_start: ClassVar[bool] = False  # from step 0, whatever the warm-up is
    has_own_warmup: ClassVar[bool] = False

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[Contradiction]:
        """Fields that it needs and the recipe does not set, or that do not go together."""
        return iter(())

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        """The learning rate of a step after warm-up."""
        raise NotImplementedError

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        """The line of the plan."""
        return plan.name


class Constant(Schedule):
    fields = _WITH_WARMUP

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        return plan.peak_lr


class Decaying(Schedule):
    """Interpolation from the peak to the end value, which is reached at `decay_until`."""

    fields: ClassVar[tuple[str, ...]] = _DECAYING

    @classmethod
    def factor(cls, plan: SchedulePlan, progress: float) -> float:
        """From 1 at progress 0 to 0 at progress 1."""
        raise NotImplementedError

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        end = plan.total_steps if plan.end_steps is None else plan.end_steps
        first = _first_step(plan)
        progress = min(1.0, (step - first) / (end - first)) if end - first > 0 else 1.0
        return plan.end_lr + (plan.peak_lr - plan.end_lr) * cls.factor(plan, progress)

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        end = "" if plan.end_steps is None else f" at step {plan.end_steps:,}"
        return f"{cls.label(plan)} to {plan.end_lr:g}{end}"

    @classmethod
    def label(cls, plan: SchedulePlan) -> str:
        return plan.name


class Cosine(Decaying):
    @classmethod
    def factor(cls, plan: SchedulePlan, progress: float) -> float:
        return 0.5 * (1 + math.cos(math.pi * progress))


class Linear(Decaying):
    @classmethod
    def factor(cls, plan: SchedulePlan, progress: float) -> float:
        return 1 - progress


class Polynomial(Decaying):
    fields = (*_DECAYING, "power")

    @classmethod
    def factor(cls, plan: SchedulePlan, progress: float) -> float:
        power: float = (1 - progress) ** plan.power
        return power

    @classmethod
    def label(cls, plan: SchedulePlan) -> str:
        return f"polynomial of power {plan.power:g}"


class Step(Schedule):
    fields = (*_WITH_WARMUP, "warmup_mode", "period", "gamma")
    counts_from_start = True

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[Contradiction]:
        if recipe.schedule.period is None:
            yield _needs(recipe, "period", "30ep")

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        assert plan.period_steps is not None, "the recipe requires a period"
        return float(plan.peak_lr * plan.gamma ** int(step // plan.period_steps))

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        return f"step: x {plan.gamma:g} every {section.period}"


class MultiStep(Schedule):
    fields = (*_WITH_WARMUP, "warmup_mode", "milestones", "milestone_when", "gamma")
    counts_from_start = True

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[Contradiction]:
        if not recipe.schedule.milestones:
            yield _needs(recipe, "milestones", "[30ep, 60ep]")

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        return float(plan.peak_lr * plan.gamma ** _num_milestones(plan, step))

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        steps = ", ".join(f"{step:,}" for step in plan.milestone_steps)
        noun = "step" if len(plan.milestone_steps) == 1 else "steps"
        return f"multistep: x {plan.gamma:g} at {noun} {steps}"


class Piecewise(Schedule):
    """A learning rate of its own from each milestone on."""

    fields = (*_WITH_WARMUP, "warmup_mode", "milestones", "milestone_when", "milestone_lrs")
    counts_from_start = True

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[Contradiction]:
        schedule = recipe.schedule
        num_rates, num_milestones = len(schedule.milestone_lrs), len(schedule.milestones)
        if num_rates == 0:
            text = (
                "piecewise needs schedule.milestone_lrs, one for each milestone; schedule.lr applies before the first"
            )
            yield Contradiction(("schedule.name", "schedule.milestone_lrs"), text)
        elif num_rates != num_milestones:
            text = f"has {num_rates} values, but schedule.milestones has {num_milestones}; it needs one for each"
            yield Contradiction(("schedule.milestone_lrs", "schedule.milestones"), text)
        if not schedule.uses_lr and schedule.lr not in (type(schedule)().lr, *schedule.milestone_lrs[:1]):
            scale = schedule.lr / max(schedule.milestone_lrs)
            rates = ", ".join(f"{scale * rate:.4g}" for rate in schedule.milestone_lrs)
            yield Contradiction(
                ("schedule.lr", "schedule.milestone_lrs", "schedule.milestones"),
                f"{schedule.lr:g} has no effect: the first milestone is {schedule.milestones[0]}, "
                "and from there schedule.milestone_lrs apply",
                (
                    f"--lr {scale * schedule.milestone_lrs[0]:.4g} --set 'schedule.milestone_lrs=[{rates}]'",
                    "--set schedule.name=constant",
                    "--set schedule.name=cosine",
                ),
            )

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        return (plan.peak_lr, *plan.milestone_lrs)[_num_milestones(plan, step)]

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        pairs = zip(plan.milestone_lrs, section.milestones, strict=True)
        late = sum(step >= plan.total_steps for step in plan.milestone_steps)
        levels = ", ".join(f"{value:g} from {milestone}" for value, milestone in pairs)
        first = f"{plan.peak_lr:g}, " if plan.milestone_steps[0] > 0 else ""
        return f"piecewise: {first}{levels}" + (f" ({count(late, 'value')} after the end)" if late else "")


class Exponential(Schedule):
    fields = (*_WITH_WARMUP, "warmup_mode", "period", "num_periods", "staircase", "gamma")

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[Contradiction]:
        if recipe.schedule.num_periods is not None and recipe.schedule.period is not None:
            text = "sets the period, as schedule.period does; remove one of them"
            yield Contradiction(("schedule.num_periods", "schedule.period"), text)

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        since = step - _first_step(plan)
        if plan.staircase:  # whole periods
            periods: float = int(since // (plan.period_steps or int(plan.steps_per_epoch)))
        else:
            periods = since / float(plan.period_steps or plan.steps_per_epoch)
        return float(plan.peak_lr * plan.gamma**periods)

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        drops = f"{count(section.num_periods, 'time')} in the run" if section.num_periods else f"every {section.period}"
        often = "every epoch" if section.num_periods is None and section.period is None else drops
        return f"exponential: x {plan.gamma:g} {often}" + (", staircase" if plan.staircase else "")


class OneCycle(Schedule):
    """A rise from the start value at step 0 to the peak at step W - 1, and a fall to the end value at the last step."""

    fields = (*_COMMON, "end_lr", "end_lr_ratio", "start_lr_ratio", "anneal_strategy")  # by epochs it misses its peak
    has_own_warmup = True

    @classmethod
    def contradictions(cls, recipe: Recipe) -> Iterator[Contradiction]:
        if recipe.schedule.warmup.value == 0:
            yield _needs(recipe, "warmup", "30%")

    @classmethod
    def rate(cls, plan: SchedulePlan, step: int) -> float:
        peak, last = plan.warmup_steps - 1, plan.total_steps - 1
        if step == peak:
            return plan.peak_lr
        if step < peak:
            return cls._anneal(plan, plan.start_lr, plan.peak_lr, step / peak)
        progress = min(1.0, (step - peak) / (last - peak)) if last > peak else 1.0
        return cls._anneal(plan, plan.peak_lr, plan.end_lr, progress)

    @classmethod
    def _anneal(cls, plan: SchedulePlan, start: float, end: float, progress: float) -> float:
        factor = progress if plan.anneal_strategy == "linear" else 0.5 * (1 - math.cos(math.pi * progress))
        return start + (end - start) * factor

    @classmethod
    def text(cls, plan: SchedulePlan, section: ScheduleConfig) -> str:
        rise = f"{plan.start_lr:g} to {plan.peak_lr:g} in {count(plan.warmup_steps, 'step')}"
        return f"one-cycle, {plan.anneal_strategy}: {rise}, then to {plan.end_lr:g}"


SCHEDULES: Mapping[str, type[Schedule]] = {
    "constant": Constant,
    "cosine": Cosine,
    "linear": Linear,
    "polynomial": Polynomial,
    "step": Step,
    "multistep": MultiStep,
    "piecewise": Piecewise,
    "exponential": Exponential,
    "one-cycle": OneCycle,
}


def _first_step(plan: SchedulePlan) -> int:
    return plan.warmup_steps if plan.warmup_mode == "prefix" else 0


def _num_milestones(plan: SchedulePlan, step: int) -> int:
    """The number of milestones up to a step."""
    return sum(step >= milestone for milestone in plan.milestone_steps)


def _needs(recipe: Recipe, field: str, example: str) -> Contradiction:
    text = f"{recipe.schedule.name} needs schedule.{field}, as in {example}"
    return Contradiction(("schedule.name", f"schedule.{field}"), text)


@dataclass(slots=True)
class LrSchedule:
    """The learning rate of a run by step: that of its plan, times a factor that rewinds make smaller."""

    plan: SchedulePlan
    factor: float = 1.0

    def __call__(self, step: int) -> float:
        return learning_rate(self.plan, step) * self.factor


def learning_rate(plan: SchedulePlan, step: int) -> float:
    """The learning rate of a step, counted from 0."""
    at, schedule = step - step % plan.tick_steps, SCHEDULES[plan.name]
    if at >= plan.warmup_steps or schedule.has_own_warmup:
        return schedule.rate(plan, at)
    peak = schedule.rate(plan, at) if plan.warmup_mode == "multiply" else plan.peak_lr
    if plan.warmup_shape == "constant":
        at = 0
    if isinstance(plan.warmup_from, float):
        return peak * (plan.warmup_from + (1 - plan.warmup_from) * at / plan.warmup_steps)
    warmed_up = at if plan.warmup_from == "zero" else min(at + plan.tick_steps, plan.warmup_steps)
    return peak * warmed_up / plan.warmup_steps


def schedule_text(plan: SchedulePlan, section: ScheduleConfig) -> str:
    """The line of the plan about warm-up and schedule."""
    shape = SCHEDULES[plan.name].text(plan, section)
    if SCHEDULES[plan.name].has_own_warmup:
        return f"lr schedule: {shape}"
    warmup = counted = ""
    if plan.warmup_steps:
        counted = "" if plan.warmup_mode == "prefix" else " from step 0"
        begin = {"first": "", "zero": " from 0"}.get(str(plan.warmup_from), f" from {plan.warmup_from} of the rate")
        constant = "constant " * (plan.warmup_shape == "constant")
        then = "times" if plan.warmup_mode == "multiply" else "then"
        warmup = f"{constant}warm-up{begin} over {count(plan.warmup_steps, 'step')}, {then} "
    update = ", updated every epoch" if section.interval == "epoch" else ""
    return f"lr schedule: {warmup}{shape}{counted}{update}"


def schedule_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Contradictions between the fields of the section, and with the length."""
    schedule, length = recipe.schedule, recipe.length
    yield from _unused_by_schedule(schedule)
    yield from SCHEDULES[schedule.name].contradictions(recipe)
    if schedule.end_lr_ratio is not None and schedule.end_lr > 0:
        text = "sets the final learning rate, as schedule.end_lr does; remove one of them"
        yield Contradiction(("schedule.end_lr_ratio", "schedule.end_lr"), text)
    for before, after in pairwise(schedule.milestones):
        if before.unit == after.unit and before.value >= after.value:
            yield Contradiction(("schedule.milestones",), f"must increase, but {after} follows {before}")
    if schedule.warmup.unit == length.unit and schedule.warmup.value > length.value:
        longer = f"--epochs {schedule.warmup.value:g}" if length.unit == "ep" else f"--set length={schedule.warmup}"
        yield Contradiction(
            ("schedule.warmup", "length"),
            f"{schedule.warmup} is longer than the run (length {length})",
            (longer, f"--set schedule.warmup={length}", "--set schedule.warmup=5%"),
        )


def _unused_by_schedule(schedule: ScheduleConfig) -> Iterator[Contradiction]:
    """Fields that the schedule does not use and that are not at their default."""
    defaults = type(schedule)()
    for name in type(schedule).model_fields:
        is_used = name in SCHEDULES[schedule.name].fields
        if not is_used and getattr(schedule, name) != getattr(defaults, name):
            users = [key for key, user in SCHEDULES.items() if name in user.fields]
            text = f"is for {join_words(users)}, but schedule.name is {schedule.name}"
            yield Contradiction((f"schedule.{name}", "schedule.name"), text)


def plan_schedule(section: ScheduleConfig, global_batch: int, steps_per_epoch: int, total: int) -> SchedulePlan:
    """The schedule of a run of `total` steps; RecipeError for what only shows in steps."""
    used = SCHEDULES[section.name].fields
    scale = 1 if section.base_batch_size is None else global_batch / section.base_batch_size
    peak = section.lr if section.base_batch_size is None else section.lr * global_batch / section.base_batch_size
    end = section.end_lr if section.end_lr_ratio is None else section.end_lr_ratio * peak
    warmup = duration_steps(section.warmup, steps_per_epoch, total)
    horizon = total if section.decay_until is None else duration_steps(section.decay_until, steps_per_epoch, total)
    if section.num_periods is None:
        period = None if section.period is None else exact_steps(section.period, steps_per_epoch, total)
    else:
        period = ExactFraction(total, section.num_periods)
    milestones = [exact_steps(milestone, steps_per_epoch, total) for milestone in section.milestones]
    _check_schedule(section, peak, warmup, horizon, total)
    _check_milestones(section, milestones)
    return SchedulePlan(
        name=section.name,
        peak_lr=peak,
        end_lr=end,
        total_steps=total,
        steps_per_epoch=float(steps_per_epoch),
        warmup_steps=warmup,
        period_steps=period,
        milestone_steps=tuple(
            math.floor(m) + 1 if section.milestone_when == "exceeded" else math.ceil(m) for m in milestones
        ),
        gamma=section.gamma,
        power=section.power,
        tick_steps=steps_per_epoch if section.interval == "epoch" else 1,
        warmup_from=section.warmup_from,
        warmup_shape=section.warmup_shape,
        warmup_mode=section.warmup_mode,
        end_steps=None if section.decay_until is None else horizon,
        milestone_lrs=tuple(lr * scale for lr in section.milestone_lrs) if "milestone_lrs" in used else (),
        staircase=section.staircase,
        start_lr=section.start_lr_ratio * peak,
        anneal_strategy=section.anneal_strategy,
    )


def _check_schedule(section: ScheduleConfig, peak: float, warmup: int, horizon: int, total: int) -> None:
    """Raise RecipeError for what only shows in steps and with the scaled learning rate."""
    if warmup > total:
        raise RecipeError(
            f"schedule.warmup {section.warmup} is {count(warmup, 'step')}, but the run has only {total}",
            hint=one_of(f"--set schedule.warmup={total}step", "--set schedule.warmup=5%", f"--set length={warmup}step"),
        )
    if section.decay_until is not None and horizon <= warmup:
        raise RecipeError(
            f"schedule.decay_until {section.decay_until} is step {horizon:,}, before warm-up ends at step {warmup:,}",
            hint=one_of(
                f"--set schedule.decay_until={max(warmup + 1, total)}step",
                *([f"--set schedule.warmup={horizon - 1}step"] if horizon > 0 else []),
                "--set schedule.decay_until=null --set schedule.warmup=5%",
            ),
        )
    if "end_lr" in SCHEDULES[section.name].fields and section.end_lr > peak:
        raise RecipeError(
            f"schedule.end_lr {section.end_lr:g} is above the peak {peak:g}, but {section.name} decreases",
            why="it is not scaled with the batch size",
            hint=one_of("--set schedule.end_lr=0", f"--lr {section.end_lr:g}"),
        )


def _check_milestones(section: ScheduleConfig, steps: Sequence[ExactFraction]) -> None:
    """Raise RecipeError if milestones of different units are out of order in this run."""
    for (before, start), (after, end) in pairwise(zip(section.milestones, steps, strict=True)):
        if start >= end:
            raise RecipeError(
                f"schedule.milestones must increase, but {after} (step {float(end):,g}) follows {before} "
                f"(step {float(start):,g})",
                hint="--set 'schedule.milestones=[...]' in order, or with one unit for all",
            )
