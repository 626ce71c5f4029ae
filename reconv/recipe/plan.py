"""The plan: every number derived from a recipe, its data and the devices, computed once.

Batch sizes, durations in steps and scaled learning rates are computed here and nowhere else.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Literal

from reconv.core.errors import RecipeError, one_of
from reconv.core.text import count
from reconv.recipe import workers as decoding
from reconv.recipe.batch_split import num_copies, refuse_uneven_pipeline, split_batch
from reconv.recipe.parts.data import Decoder
from reconv.recipe.parts.schedule import SchedulePlan, plan_schedule
from reconv.recipe.plan_text import plan_lines
from reconv.recipe.schema import Recipe
from reconv.recipe.units import Duration, duration_steps, exact_steps

EVAL_AHEAD = 2  # evaluation batches to prefetch
LOG_STEPS, LOG_POINTS = 10, 50  # between two log lines; of a short run


@dataclass(frozen=True, slots=True)
class Every:
    """Schedule of something that is due after these steps (counted from 1), or by the clock."""

    steps: int | None = None  # interval in steps; None: not by steps
    epoch_steps: Fraction | None = None  # interval in steps that is rounded up at each point, for epochs and percent
    offset_steps: int = 0  # the first point if above 0; intervals count from here
    minutes: float | None = None
    at_end: bool = True

    def due(self, done: int, total: int) -> bool:
        """True if it is due after `done` of `total` steps; minutes are up to the caller."""
        return done > 0 and (self._on_interval(done) or (self.at_end and done == total))

    def count(self, total: int) -> int:
        """Number of times it is due in a run of `total` steps, not counting minutes."""
        at_end = int(self.at_end and not self._on_interval(total))
        interval = self._interval()
        if interval is None or total < self.offset_steps:
            return at_end
        return (
            math.floor((total - self.offset_steps) / max(interval, Fraction(1))) + int(self.offset_steps > 0) + at_end
        )

    def _interval(self) -> Fraction | None:
        return self.epoch_steps if self.steps is None else Fraction(self.steps)

    def _on_interval(self, done: int) -> bool:
        interval, since = self._interval(), done - self.offset_steps
        if interval is None or since < 0:
            return False
        return since // interval > (since - 1) // interval


@dataclass(frozen=True, slots=True)
class AveragingWindow:
    """Checkpoints to average: those that `save` wrote in the last `steps` steps, and the last one.

    Checkpoints written for a signal or a new best metric do not count, so that an interrupted run averages the same.
    """

    steps: int
    save: Every

    def holds(self, step: int, done: int) -> bool:
        """True if the checkpoint of a step belongs to the average of a run that ends after `done` steps."""
        return done - self.steps < step <= done and self.save.due(step, done)


@dataclass(frozen=True, slots=True)
class CacheSize:
    """Memory needed to cache every sample, and memory available for it."""

    needed_bytes: int
    available_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts that a plan needs besides the recipe: the data, the devices and this machine."""

    num_train: int  # after data.subset_percent
    num_val: int  # after evaluate.num_samples
    num_classes: int
    world_size: int = 1
    cores: int = 1  # that this process may use
    device: str = ""  # kind of device; empty: unknown
    source: str = ""  # detected data source; empty: the recipe's
    data_origins: tuple[str, ...] = ()  # what the data is, how it was recognized and split, for people
    cache: CacheSize | None = None  # None: samples are not cached
    num_val_left_out: int = 0  # by evaluate.num_samples
    decoder: Decoder = "pillow"  # for augment.decoder: auto
    fills_from_files: bool = False  # the native decoder could crop many training images in one call


@dataclass(frozen=True, slots=True)
class Plan:
    """Every derived number of a run."""

    num_train: int
    num_val: int
    num_classes: int
    world_size: int
    global_batch: int
    batch_per_device: int  # of the first device; others may have fewer
    micro_batch: int  # a whole number of groups; the last one of a device may differ
    num_micro_batches: int  # per device and step
    group: int  # samples; the last group of a step may differ
    group_sizes: tuple[int, ...]  # of one global batch, in order
    device_groups: tuple[tuple[int, ...], ...]  # for each device, the sizes of its groups or of its part of one
    steps_per_epoch: float
    total_steps: int
    schedule: SchedulePlan
    log: Every
    evaluate: Every | None  # None: off
    save: Every | None
    keep_steps: tuple[int, ...]  # checkpoints of these steps are never deleted
    eval_batch: int
    threads: int
    workers: int
    backend: str  # caller (no workers), threads or processes
    eval_backend: str  # of validation images
    eval_batches_held: int  # evaluation batches in memory at once
    steps_held: int  # steps with images in memory at once: prefetched ones, the current and the previous one
    sizes: tuple[tuple[int, int], ...]  # (first step, pixels) of training images
    freeze_steps: int = 0  # steps that train only the head; then all parameters are trained
    num_val_left_out: int = 0  # above 0: evaluations are partial
    data_origins: tuple[str, ...] = ()  # what the data is, how it was recognized and split, for people
    alpha: float | None = None  # rmsprop's smoothing constant
    average: AveragingWindow | None = None  # None: checkpoints are not averaged
    cache: CacheSize | None = None  # None: samples are not cached
    decoder: Decoder = "pillow"  # of cropped JPEG files
    device: str = ""  # kind of device; empty: unknown
    fitted: tuple[str, ...] = ()  # lines about what was changed to fit the user's options and data
    lines: tuple[str, ...] = field(default=())  # the plan as text, for people

    def size_at(self, step: int) -> int:
        """Height and width of the training images of a step, in pixels."""
        return next(size for start, size in reversed(self.sizes) if start <= step)

    @property
    def devices_per_group(self) -> int:
        """Number of devices that share a group; 1: none is shared."""
        return max(1, self.world_size // len(self.group_sizes))

    @property
    def micro_groups(self) -> int:
        """Groups per micro-batch; 1 where a device has a part of a group."""
        return max(1, self.micro_batch // self.group)

    def one_device(self) -> Plan:
        """The plan of the first device on its own: its samples, groups and micro-batches."""
        groups = self.device_groups[0]
        return replace(self, world_size=1, global_batch=sum(groups), group_sizes=groups, device_groups=(groups,))

    def rows(self, rank: int = 0) -> slice:
        """The rows of the global batch that belong to a device."""
        first = sum(map(sum, self.device_groups[:rank]))
        return slice(first, first + sum(self.device_groups[rank]))

    def micro_batches(self, rank: int = 0) -> tuple[tuple[int, ...], ...]:
        """The group sizes of each micro-batch of a device, in order."""
        groups = self.device_groups[rank]
        return tuple(groups[i : i + self.micro_groups] for i in range(0, len(groups), self.micro_groups))


def make_plan(recipe: Recipe, facts: Facts, fitted: Sequence[str] = ()) -> Plan:
    """Compute every derived number, or raise RecipeError with values that would work.

    `fitted` are lines about what was changed to fit, for the plan's text.
    """
    copies = num_copies(recipe, facts.world_size)
    split = split_batch(recipe, copies)
    per_epoch = steps_per_epoch(recipe, facts.num_train)
    total = length_steps(recipe.length, per_epoch)
    kept = (duration_steps(point, per_epoch, total) for point in recipe.save.keep_at)
    workers = decoding.workers(recipe, facts)
    plan = Plan(
        num_train=facts.num_train,
        num_val=facts.num_val,
        num_val_left_out=facts.num_val_left_out,
        data_origins=facts.data_origins,
        num_classes=facts.num_classes,
        world_size=copies,
        global_batch=recipe.batch.size,
        batch_per_device=split.per_device,
        micro_batch=split.micro,
        num_micro_batches=split.num_micro,
        group=split.group,
        group_sizes=split.groups,
        device_groups=split.on_devices,
        steps_per_epoch=float(per_epoch),
        total_steps=total,
        schedule=plan_schedule(recipe.schedule, recipe.batch.size, per_epoch, total),
        log=_log_every(recipe.log.every, per_epoch, total),
        evaluate=None
        if recipe.evaluate.every == "off"
        else _every(recipe.evaluate.every, per_epoch, total, recipe.evaluate.offset),
        save=None if recipe.save.every == "off" else _every(recipe.save.every, per_epoch, total),
        keep_steps=tuple(sorted({step for step in kept if 0 < step <= total})),
        eval_batch=recipe.evaluate.batch_size,
        threads=facts.cores if recipe.engine.num_threads == "auto" else recipe.engine.num_threads,
        workers=workers,
        backend=decoding.backend(recipe, facts),
        eval_backend=decoding.eval_backend(recipe, facts),
        eval_batches_held=(EVAL_AHEAD if workers else 0) + 2,
        steps_held=(recipe.data.prefetch if workers else 0) + 2,
        sizes=_sizes(recipe, per_epoch, total),
        freeze_steps=_freeze_steps(recipe, per_epoch, total),
        cache=facts.cache,
        decoder=decoding.decoder(recipe, facts),
        device=facts.device,
        fitted=tuple(fitted),
    )
    refuse_uneven_pipeline(recipe, [micro for rank in range(copies) for micro in plan.micro_batches(rank)], split)
    plan = replace(plan, alpha=_alpha(recipe), average=averaging_window(recipe, per_epoch, total))
    return replace(plan, lines=plan_lines(recipe, plan))


def with_micro(recipe: Recipe, plan: Plan, num_groups: int, why: str) -> Plan:
    """The plan with micro-batches of at most `num_groups` groups, and `why` as its last line."""
    groups = len(plan.device_groups[0])
    per_micro = min(num_groups, groups)
    smaller = replace(plan, micro_batch=per_micro * plan.group, num_micro_batches=math.ceil(groups / per_micro))
    return replace(smaller, lines=(*plan_lines(recipe, smaller), why))


def steps_per_epoch(recipe: Recipe, num_train: int) -> int:
    """Optimizer steps of an epoch, or RecipeError if the samples do not fill a batch."""
    size = recipe.batch.size
    counted = min(num_train, 1) * (recipe.data.epoch_samples or num_train)
    if not recipe.data.drop_last and counted > 0:
        return math.ceil(counted / size)
    if num_train == 0:
        raise RecipeError("the dataset has no training samples", hint="check --data")
    if num_train < size:
        raise RecipeError(
            f"the dataset has {count(num_train, 'training sample')}, fewer than the global batch of {size}",
            why="data.drop_last: true drops the samples that do not fill a batch",
            hint=one_of(f"--batch-size {num_train}", "--set data.drop_last=false"),
        )
    if counted < size:
        raise RecipeError(
            f"data.epoch_samples {counted} is smaller than the global batch of {size}, so an epoch would have no steps",
            hint=one_of(f"--batch-size {counted}", f"--set data.epoch_samples={size}", "--set data.drop_last=false"),
        )
    return counted // size


def length_steps(length: Duration, steps_per_epoch: int) -> int:
    """Length of a run in steps, rounded to the nearest and at least 1."""
    return max(1, duration_steps(length, steps_per_epoch, total=0))


def _every(duration: Duration | str, steps_per_epoch: int, total: int, offset: Duration | None = None) -> Every:
    assert isinstance(duration, Duration)
    offset_steps = 0 if offset is None else duration_steps(offset, steps_per_epoch, total)
    if duration.unit == "min":
        return Every(minutes=duration.value, offset_steps=offset_steps)
    if duration.unit == "step":
        return Every(steps=int(duration.value), offset_steps=offset_steps)
    return Every(epoch_steps=exact_steps(duration, steps_per_epoch, total), offset_steps=offset_steps)


def _log_every(duration: Duration | Literal["auto"], steps_per_epoch: int, total: int) -> Every:
    """The interval of the log; `auto` is shorter in runs of less than 500 steps, for the curves of the report.

    It is two steps at least: a run that logs every step waits for the device.
    """
    if not isinstance(duration, Duration):
        return Every(steps=min(LOG_STEPS, max(2, total // LOG_POINTS)))
    return _every(duration, steps_per_epoch, total)


def _sizes(recipe: Recipe, steps_per_epoch: int, total: int) -> tuple[tuple[int, int], ...]:
    """(first step, pixels) of training images; sizes that would start after the run are left out."""
    sizes = {0: recipe.augment.size or recipe.data.preprocess.size}
    latest = 0
    for start, size in recipe.augment.progressive_resizing:
        step = duration_steps(start, steps_per_epoch, total)
        if step < latest:
            raise RecipeError(
                f"augment.progressive_resizing must increase, but {start} is step {step}, before step {latest}",
                hint="--set 'augment.progressive_resizing=[...]' in order, or with one unit for all",
            )
        latest = step
        sizes |= {step: size} if step < total else {}
    return tuple(sizes.items())


def _freeze_steps(recipe: Recipe, steps_per_epoch: int, total: int) -> int:
    """Number of steps that train only the head."""
    until = recipe.model.freeze_until
    if not isinstance(until, Duration):
        return 0
    steps = duration_steps(until, steps_per_epoch, total)
    if steps >= total:
        raise RecipeError(
            f"model.freeze_until {until} is {count(steps, 'step')}, but the run has only {total}",
            hint=one_of("--freeze --set model.freeze_until=off", "--set model.freeze_until=10%"),
        )
    return steps


def averaging_window(
    recipe: Recipe, steps_per_epoch: int, total: int, last: Duration | None = None
) -> AveragingWindow | None:
    """The checkpoints that the recipe (or another `last`) averages, or None if it averages none."""
    wanted = last or recipe.checkpoint_average.last
    if not isinstance(wanted, Duration) or recipe.save.every == "off":
        return None
    return AveragingWindow(
        max(1, duration_steps(wanted, steps_per_epoch, total)), _every(recipe.save.every, steps_per_epoch, total)
    )


def _alpha(recipe: Recipe) -> float | None:
    """RMSprop's smoothing constant, given directly or by the global batch."""
    optimizer = recipe.optimizer
    if not optimizer.name.startswith("rmsprop"):
        return None
    if optimizer.alpha_exponent is None:
        return optimizer.alpha
    alpha = 1 - recipe.batch.size * math.pow(2, optimizer.alpha_exponent)
    if alpha < 0:
        highest = -math.ceil(math.log2(recipe.batch.size))
        largest = math.floor(math.pow(2, -optimizer.alpha_exponent))
        raise RecipeError(
            f"optimizer.alpha_exponent {optimizer.alpha_exponent:g} makes alpha "
            f"1 - {recipe.batch.size} x 2^{optimizer.alpha_exponent:g} = {alpha:g}",
            why="alpha must be between 0 and 1",
            hint=one_of(
                f"--batch-size {largest}",
                f"--set optimizer.alpha_exponent={highest}",
                "--set optimizer.alpha_exponent=null",
            ),
        )
    return alpha
