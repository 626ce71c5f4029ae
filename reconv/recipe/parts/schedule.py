"""The recipe section `schedule`: the learning rate and how it changes during a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, model_validator

from reconv.recipe.units import (
    Duration,
    Fraction,
    Listed,
    NonNegative,
    Positive,
    PositiveFloat,
    Section,
    parse_rate,
    split_rate,
)


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
    """Length of the linear warm-up."""
    warmup_from: Literal["first", "zero"] = "first"
    """Step s of a warm-up of W steps uses the fraction (s + 1) / W (`first`) or s / W (`zero`)."""
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
