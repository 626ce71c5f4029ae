"""Dry runs: a few steps of a run in a temporary folder, to see whether it works, how fast it is and what it costs.

Nothing is left of a dry run but its result.

It is the same run in a temporary folder, stopped early (tests/trainer/test_dry_run.py).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from reconv.build.data import Datasets
from reconv.core.custom_code import code_errors
from reconv.core.message import message
from reconv.data.readers.dataset_factory import select
from reconv.logging import formatting as fmt
from reconv.logging.clock import rates_of
from reconv.logging.events import CheckpointSaved, DataWait, EvalFinished, Event, RunPlanned, TrainProgress
from reconv.recipe.loader import Override
from reconv.recipe.plan import Every, Plan
from reconv.recipe.schema import Recipe
from reconv.storage.temporary_folder import temporary_folder
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import run_on_devices
from reconv.trainer.run import TrainingRun

COMPILE_STEPS = 2  # the first compiles; the second runs with the optimizer state allocated
_AT_END = Every()  # once, after the last step
# A dry run exports nothing and takes all of its steps.
SHORT_RUN: Sequence[Override] = (
    ("loggers", [], "--dry-run"),
    ("profile", "off", "--dry-run"),
    ("early_stopping.target", "off", "--dry-run"),
    ("early_stopping.patience", "off", "--dry-run"),
)

E = TypeVar("E", bound=Event)


@message
@dataclass(frozen=True, slots=True)
class DryRunResult:
    """Measurements of a dry run; None for what it did not reach."""

    recipe: str
    steps: int
    total_steps: int  # of the whole run
    setup_s: float  # until data, network and device are ready
    first_step_s: float  # includes compilation
    step_s: float | None  # mean of the later steps
    images_per_s: float | None
    compute_images_per_s: float | None
    data_wait_fraction: float
    peak_memory_bytes: int
    evaluation_s: float | None  # estimated for the whole validation set
    save_s: float | None
    checkpoint_bytes: int | None
    estimated_s: float | None  # of the whole run
    estimated_disk_bytes: int | None
    notes: tuple[str, ...] = ()


def dry_run(
    recipe: str | Path,
    *,
    steps: int | None = None,
    data: str | Path | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    devices: int | None = None,
    nic: str | None = None,
    trust_code: bool = False,
    on_event: Callable[[Event], None] | None = None,
) -> DryRunResult:
    """Run `steps` steps, an evaluation and a save; without `steps`, only what compiles the model.

    With several `devices`, `on_event` must be importable.
    """
    args = RunOptions(str(recipe), (*overrides, *SHORT_RUN), data, device=device, nic=nic, trust_code=trust_code)
    return run_on_devices(devices, _dry_run, args, steps, on_event)


def _dry_run(args: RunOptions, steps: int | None, on_event: Callable[[Event], None] | None) -> DryRunResult:
    start_s = time.time()
    events: list[Event] = []

    def collect(event: Event) -> None:
        events.append(event)
        if on_event is not None:
            on_event(event)

    with temporary_folder("dry-run") as folder:
        args = replace(args, out=folder / "run")
        with TrainingRun.from_args(args, collect) as run:
            short = _shorten(run, steps)
            with code_errors():
                short.trainer().fit()
            return run.process_group.on_rank0(lambda: _measure(run, short, events, start_s))


def _shorten(run: TrainingRun, steps: int | None) -> TrainingRun:
    """The run with `steps` steps and as many evaluation batches; its schedule is that of the whole run."""
    plan, datasets = run.plan, run.datasets
    if steps is None:
        plan = replace(plan, total_steps=min(COMPILE_STEPS, plan.total_steps), evaluate=None, save=None)
    else:
        num_val = min(plan.num_val, steps * plan.eval_batch)
        plan = replace(
            plan,
            total_steps=min(steps, plan.total_steps),
            num_val=num_val,
            evaluate=None if plan.evaluate is None else _AT_END,
            save=None if plan.save is None else _AT_END,
        )
        datasets = Datasets(datasets.train, select(datasets.val, np.arange(num_val, dtype=np.int64)))
    # freeze_steps=0: most steps of a run train all parameters.
    plan = replace(plan, log=Every(steps=1), keep_steps=(), average=None, freeze_steps=0)
    return replace(run, plan=plan, datasets=datasets)


def _measure(run: TrainingRun, short: TrainingRun, events: Sequence[Event], start_s: float) -> DryRunResult:
    """Measurements from the events of a dry run, and estimates for the whole run."""
    recipe, whole, plan, clock = run.recipe, run.plan, short.plan, run.clock
    ready_s = _times_s(_all(events, RunPlanned))[0]
    first_s, *later_s = _times_s(_all(events, TrainProgress))
    rates = rates_of(clock.timed_images, clock.train_s, clock.wait_s)
    evaluated, saved = _all(events, EvalFinished), _all(events, CheckpointSaved)
    evaluation_s = sum(e.wall_s for e in evaluated) * whole.num_val / plan.num_val if evaluated else None
    save_s = saved[-1].wall_s if saved else None
    stall_s = save_s - (saved[-1].write_s or 0.0) if save_s is not None and recipe.save.background else save_s
    checkpoint_bytes = saved[-1].num_bytes if saved else None
    notes = []
    if rates.images_per_s is None:
        notes.append("too few steps to measure the speed: the first three do not count")
    if len(whole.sizes) > 1:
        notes.append(f"measured at {whole.size_at(0)} px; the run goes up to {whole.sizes[-1][1]} px and gets slower")
    if whole.freeze_steps:
        notes.append("measured with all parameters trained; steps with a frozen backbone are faster")
    for wait in _all(events, DataWait)[-1:]:
        if wait.bottleneck:
            notes.append(fmt.data_wait(wait.fraction, wait.seconds, wait.bottleneck, wait.advice))
    return DryRunResult(
        recipe=recipe.name,
        steps=plan.total_steps,
        total_steps=whole.total_steps,
        setup_s=max(0.0, ready_s - start_s),
        first_step_s=first_s - ready_s,
        step_s=(later_s[-1] - first_s) / len(later_s) if later_s else None,
        images_per_s=rates.images_per_s,
        compute_images_per_s=rates.compute_images_per_s,
        data_wait_fraction=rates.data_wait_fraction,
        peak_memory_bytes=run.device.peak_memory_bytes(),
        evaluation_s=evaluation_s,
        save_s=save_s,
        checkpoint_bytes=checkpoint_bytes,
        estimated_s=_estimate_s(whole, rates.images_per_s, evaluation_s, stall_s),
        estimated_disk_bytes=_disk_bytes(recipe, whole, checkpoint_bytes),
        notes=tuple(notes),
    )


def _all(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _times_s(events: Sequence[Event]) -> list[float]:
    return [event.time_s for event in events if event.time_s is not None]


def _estimate_s(
    plan: Plan, images_per_s: float | None, evaluation_s: float | None, save_s: float | None
) -> float | None:
    """The time of the whole run at this speed."""
    if images_per_s is None:
        return None
    total, steps_s = plan.total_steps, plan.total_steps * plan.global_batch / images_per_s
    num_evaluations = plan.evaluate.count(total) if plan.evaluate is not None else 0
    steps_s += num_evaluations * (evaluation_s or 0.0)
    if plan.save is None or save_s is None:
        return steps_s
    by_clock = steps_s / (60 * plan.save.minutes) if plan.save.minutes else 0.0
    return steps_s + (plan.save.count(total) + by_clock) * save_s


def _disk_bytes(recipe: Recipe, plan: Plan, checkpoint_bytes: int | None) -> int | None:
    """The most that kept checkpoints will need: the last, the best, those of keep_at and those to be averaged.

    All of them may be different ones: what the best evaluation or a signal has saved is not averaged.
    """
    if checkpoint_bytes is None or plan.save is None:
        return None
    kept = recipe.save.keep_last if plan.save.minutes else min(recipe.save.keep_last, plan.save.count(plan.total_steps))
    return checkpoint_bytes * (kept + recipe.save.keep_best + len(plan.keep_steps) + _num_averaged(plan))


def _num_averaged(plan: Plan) -> int:
    """Number of checkpoints that the average at the end needs."""
    if plan.average is None:
        return 0
    regular = replace(plan.average.save, at_end=False)
    before = max(0, plan.total_steps - plan.average.steps)
    return regular.count(plan.total_steps) - (regular.count(before) if before else 0)
