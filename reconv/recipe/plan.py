"""The plan: every number that follows from a recipe, its data and the devices, computed once.

Owns all derived numbers and the sentences that explain them. Refuses to know torch, files and classes. Invariant:
nobody else multiplies a batch size, converts a duration or scales a learning rate.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from reconv.recipe.schema import Recipe


@dataclass(frozen=True, slots=True)
class Every:
    """When something is due: after these steps (counted from 1), or by the clock."""

    steps: int | None = None  # every so many steps; None: never by steps
    epoch_steps: float | None = None  # every so many (real-valued) steps, rounded up: intervals in epochs
    offset_steps: int = 0  # not before this many steps are done
    minutes: float | None = None
    at_end: bool = True

    def due(self, done: int, total: int) -> bool:
        """Whether it is due when `done` of `total` steps are done (the clock is the caller's)."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class SchedulePlan:
    """The schedule with every duration in steps and the learning rate scaled."""

    kind: str
    peak_lr: float
    end_lr: float
    total_steps: int
    steps_per_epoch: float
    warmup_steps: int
    period_steps: float | None = None
    milestone_steps: tuple[int, ...] = ()
    factor: float = 0.1
    power: float = 2.0


@dataclass(frozen=True, slots=True)
class Facts:
    """What the plan must be told about the world outside the recipe."""

    num_train: int
    num_val: int
    num_classes: int
    world_size: int = 1
    cores: int = 1  # this process may use
    device: str = "cpu"


@dataclass(frozen=True, slots=True)
class Plan:
    """Every derived number of a run."""

    num_train: int
    num_val: int
    num_classes: int
    world_size: int
    global_batch: int
    batch_per_device: int
    micro_batch: int
    num_micro_batches: int  # per device and step
    group: int  # samples; the last group of a step may differ
    group_sizes: tuple[int, ...]  # of one global batch, in position order
    steps_per_epoch: float
    total_steps: int
    schedule: SchedulePlan
    log: Every
    evaluate: Every | None  # None: off
    save: Every | None
    pinned_steps: tuple[int, ...]
    eval_batch: int
    threads: int
    workers: int
    lines: tuple[str, ...] = field(default=())  # what is printed: the arithmetic in words


def make_plan(recipe: Recipe, facts: Facts) -> Plan:
    """Compute every derived number, or raise RecipeError naming values that would fit."""
    raise NotImplementedError
