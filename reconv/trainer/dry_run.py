"""Rehearsals: a few steps of a run in a temporary folder, to see that it works, how fast it goes and what it costs.

Owns how a job is cut short and what its numbers say about the whole. Refuses to know how any part works: the job is
built and run by `train`'s own functions, in one process or several. Invariant: nothing outlives a rehearsal but its
numbers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np

from reconv.checkpoint.run_dir import RunDir
from reconv.data.readers.factory import select
from reconv.device import device_kind, open_device
from reconv.device.affinity import cpu_affinity
from reconv.distributed.environment import must_launch, read_launch_env
from reconv.distributed.failure import report_failures
from reconv.distributed.nic import choose_nic
from reconv.distributed.process_group import open_process_group
from reconv.logging import formatting as fmt
from reconv.logging.clock import rates_of
from reconv.logging.events import (
    CheckpointSaved,
    DataWait,
    EvalFinished,
    Event,
    EventLog,
    RunEnded,
    RunPlanned,
    TrainProgress,
)
from reconv.logging.run_logger import RunLogger
from reconv.recipe.loader import Override, load
from reconv.recipe.plan import Every, Plan
from reconv.recipe.schema import EarlyStoppingConfig, Recipe
from reconv.trainer.build.datasets import Datasets, refuse_unread_path
from reconv.trainer.build.train_state import TrainingRun
from reconv.trainer.resume import ChosenRunDir
from reconv.trainer.run_setup import refuse_devices, refuse_different_data, topology
from reconv.trainer.stop_signal import StopSignal
from reconv.trainer.training_run import open_kept_sources, prepare_job, refuse_unplannable, run_job

COMPILING_STEPS = 2  # the first compiles; the second finds the optimizer's state there, and shows a step as it will be
_MEASURING = Every()  # at the end, once

E = TypeVar("E", bound=Event)


@dataclass(frozen=True, slots=True)
class DryRunResult:
    """What a rehearsal showed; None where it did not get that far."""

    recipe: str
    steps: int
    total_steps: int  # of the whole run
    setup_s: float  # data, network and device made ready
    first_step_s: float  # with everything that is compiled in it
    step_s: float | None  # a later one
    images_per_s: float | None
    compute_images_per_s: float | None
    data_wait_fraction: float
    peak_memory_bytes: int
    evaluation_s: float | None  # of the whole validation set
    save_s: float | None
    checkpoint_bytes: int | None
    estimated_s: float | None  # of the whole run
    estimated_disk_bytes: int | None
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Ask:
    """What to dry_run, as a process that is started for it can be told."""

    recipe: str
    steps: int | None
    data: str | Path | None
    overrides: tuple[Override, ...]
    device: str
    nic: str | None
    on_event: Callable[[Event], None] | None


def dry_run(
    recipe: str | Path,
    *,
    steps: int | None = None,
    data: str | Path | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    devices: int | None = None,
    nic: str | None = None,
    on_event: Callable[[Event], None] | None = None,
) -> DryRunResult:
    """Run so many steps, an evaluation and a save, or without `steps` only what compiles, and keep nothing of it.

    With `devices`, so many processes dry_run together, and `on_event` is a function of a module.
    """
    ask = _Ask(str(recipe), steps, data, tuple(overrides), device, nic, on_event)
    if devices is not None and must_launch(devices, read_launch_env()):
        from reconv.distributed.launcher import launch  # torch's launcher, which one process does not need

        refuse_devices(devices, device, _resolved(ask))
        return launch(devices, _rehearse, ask)
    return _rehearse(ask)


def _resolved(ask: _Ask) -> Recipe:
    """The recipe without what would be written beside the run, or end it before the steps asked for."""
    given = [*ask.overrides, *([("data.path", str(ask.data), "--data")] if ask.data is not None else [])]
    recipe = load(ask.recipe, given).recipe.model_copy(
        update={"loggers": (), "profile": "off", "early_stopping": EarlyStoppingConfig()}
    )
    refuse_unread_path(recipe, ask.data)
    return recipe


def _rehearse(ask: _Ask) -> DryRunResult:
    """Rehearse in this process, alone or with the others."""
    began_s, launch_env = time.time(), read_launch_env()
    choose_nic(ask.nic)
    process_group = open_process_group(launch_env, device_kind(ask.device))
    with ExitStack() as stack:
        stack.enter_context(report_failures(process_group))
        resolved = process_group.on_rank0(lambda: _resolved(ask))
        sources = open_kept_sources(resolved, process_group)
        refuse_different_data(process_group, sources)
        process_group.on_rank0(lambda: refuse_unplannable(resolved, sources, process_group))
        stop = stack.enter_context(StopSignal())
        opened = open_device(ask.device, local_rank=launch_env.local_rank)
        stack.enter_context(
            cpu_affinity(
                resolved.engine.cpu_affinity,
                opened.pci_address,
                local_rank=launch_env.local_rank,
                local_world_size=launch_env.local_world_size,
            )
        )
        folder = process_group.on_rank0(lambda: RunDir.at(_temporary(stack) / "run"))
        choice = ChosenRunDir(folder, exists=False)
        whole = prepare_job(resolved, sources, choice, ask.device, process_group)
        job = _cut_short(whole, ask.steps)
        events: list[Event] = []
        logger = _open_logger(stack, job, ask.on_event, events)
        for line in topology(process_group, job.device.describe()):
            logger.info(line)
        run_job(job, stop, logger)
        return process_group.on_rank0(lambda: _numbers(resolved, whole.plan, job.plan, events, began_s))


def _temporary(stack: ExitStack) -> Path:
    """A folder that is gone when the stack is unwound."""
    return Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="reconv-rehearsal-")))


def _open_logger(
    stack: ExitStack, job: TrainingRun, on_event: Callable[[Event], None] | None, events: list[Event]
) -> RunLogger:
    """Rank 0 writes the event log that the summary is made of, and collects the events; other ranks log nothing."""
    if not job.process_group.is_rank0:
        return RunLogger()
    logger = RunLogger(events.append, event_log=stack.enter_context(EventLog(job.folder.events)))
    if on_event is not None:
        logger.subscribe(on_event)
    return logger


def _cut_short(job: TrainingRun, steps: int | None) -> TrainingRun:
    """The same job, ended after so many steps and evaluating as many batches; its schedule is the whole run's."""
    plan, sources = job.plan, job.sources
    if steps is None:
        plan = replace(plan, total_steps=min(COMPILING_STEPS, plan.total_steps), evaluate=None, save=None)
    else:
        num_val = min(plan.num_val, steps * plan.eval_batch)
        plan = replace(
            plan,
            total_steps=min(steps, plan.total_steps),
            num_val=num_val,
            evaluate=None if plan.evaluate is None else _MEASURING,
            save=None if plan.save is None else _MEASURING,
        )
        sources = Datasets(sources.train, select(sources.val, np.arange(num_val, dtype=np.int64)))
    plan = replace(plan, log=Every(steps=1), keep_steps=(), average=None)
    return replace(job, plan=plan, sources=sources)


def _numbers(recipe: Recipe, whole: Plan, cut: Plan, events: Sequence[Event], began_s: float) -> DryRunResult:
    """What the events of a rehearsal say about it and about the whole run."""
    ready_s = _times_s(_all(events, RunPlanned))[0]
    first_s, *later_s = _times_s(_all(events, TrainProgress))
    ended = _all(events, RunEnded)[-1]
    rates = rates_of(ended.timed_images or 0, ended.train_s, ended.wait_s)
    scored, saved = _all(events, EvalFinished), _all(events, CheckpointSaved)
    evaluation_s = sum(e.wall_s for e in scored) * whole.num_val / cut.num_val if scored else None
    save_s = saved[-1].wall_s if saved else None
    copy_s = save_s - (saved[-1].write_s or 0.0) if save_s is not None and recipe.save.background else save_s
    checkpoint_bytes = saved[-1].num_bytes if saved else None
    notes = []
    if rates.images_per_s is None:
        notes.append("too few steps to tell the speed: the first three are left out")
    if len(whole.sizes) > 1:
        notes.append(f"measured at {whole.size_at(0)} px; the run goes on to {whole.sizes[-1][1]} px and gets slower")
    for waited in _all(events, DataWait)[-1:]:
        if waited.bottleneck:
            notes.append(fmt.data_wait(waited.fraction, waited.seconds, waited.bottleneck, waited.advice))
    return DryRunResult(
        recipe=recipe.name,
        steps=cut.total_steps,
        total_steps=whole.total_steps,
        setup_s=max(0.0, ready_s - began_s),
        first_step_s=first_s - ready_s,
        step_s=(later_s[-1] - first_s) / len(later_s) if later_s else None,
        images_per_s=rates.images_per_s,
        compute_images_per_s=rates.compute_images_per_s,
        data_wait_fraction=rates.data_wait_fraction,
        peak_memory_bytes=ended.peak_memory_bytes,
        evaluation_s=evaluation_s,
        save_s=save_s,
        checkpoint_bytes=checkpoint_bytes,
        estimated_s=_estimated_s(whole, rates.images_per_s, evaluation_s, copy_s),
        estimated_disk_bytes=_disk_bytes(recipe, whole, checkpoint_bytes),
        notes=tuple(notes),
    )


def _all(events: Sequence[Event], kind: type[E]) -> list[E]:
    return [event for event in events if isinstance(event, kind)]


def _times_s(events: Sequence[Event]) -> list[float]:
    return [event.time_s for event in events if event.time_s is not None]


def _estimated_s(
    plan: Plan, images_per_s: float | None, evaluation_s: float | None, save_s: float | None
) -> float | None:
    """The time the whole run will take at this speed."""
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
    """What the checkpoints that are kept will take at most: the last, the best, the pinned and those for an average.

    They may be different ones all: a checkpoint that a good evaluation or a signal had saved is no part of an average.
    """
    if checkpoint_bytes is None or plan.save is None:
        return None
    kept = recipe.save.keep_last if plan.save.minutes else min(recipe.save.keep_last, plan.save.count(plan.total_steps))
    return checkpoint_bytes * (kept + recipe.save.keep_best + len(plan.keep_steps) + _num_averaged(plan))


def _num_averaged(plan: Plan) -> int:
    """How many checkpoints of the saving interval an average of the last ones needs."""
    if plan.average is None:
        return 0
    regular = replace(plan.average.save, at_end=False)
    before = max(0, plan.total_steps - plan.average.steps)
    return regular.count(plan.total_steps) - (regular.count(before) if before else 0)
