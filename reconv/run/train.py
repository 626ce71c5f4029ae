"""`train`: a recipe becomes a plan, parts, a loop, and a run folder with a summary and a report.

Owns the order in which a run is set up and wound down. Refuses to know how any part works. Invariant: whatever
happens after the run folder is claimed ends with an `end` event, a summary and a report.
"""

from __future__ import annotations

import platform
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from reconv import __version__
from reconv.checkpoint.runfolder import RunFolder
from reconv.checkpoint.store import Store
from reconv.data.loader import TrainLoader
from reconv.data.prepare import TrainPrepare
from reconv.device import Device, is_out_of_memory, open_device
from reconv.doctor import Machine, usable_cores
from reconv.engine.loop import Counters, Fit
from reconv.engine.schedule import learning_rate
from reconv.engine.step import PlainStep
from reconv.engine.stop import StopRequest
from reconv.engine.trace import Trace
from reconv.engine.watch import Watch
from reconv.errors import Exit, RecipeError, ReconvError, ResourceError, UsageError
from reconv.optim import Ema, build_optimizer
from reconv.parallel.world import World
from reconv.recipe.load import Override, dump, load
from reconv.recipe.plan import Facts, Plan, make_plan
from reconv.recipe.schema import Recipe
from reconv.report.clock import Clock
from reconv.report.console import Observer, make_console
from reconv.report.events import Attempt, Ended, Event, EventLog, Noted, Planned, read_events
from reconv.report.exporters import Records, require_packages
from reconv.report.html import write_report
from reconv.report.summary import read_summary, write_summary
from reconv.report.whole import write_whole
from reconv.run import parts
from reconv.run.average import average_at_end
from reconv.run.folder import (
    Choice,
    RestorePoint,
    check_same_run,
    choose_folder,
    existing_run,
    find_restore_point,
    known_data_path,
)
from reconv.run.start import refuse_absent_weights, start_network
from reconv.run.teacher import open_teacher
from reconv.run.tracing import build_trace, refuse_profile_beyond_end


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished `train` leaves behind."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int


@dataclass(frozen=True, slots=True)
class Job:
    """Everything decided before the first part is built."""

    recipe: Recipe
    plan: Plan
    sources: parts.Sources
    device: Device
    world: World
    folder: RunFolder
    point: RestorePoint


def train(
    recipe: str | Path,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    devices: int = 1,
    console: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    runs: str | Path = "runs",
    command: Sequence[str] = (),
) -> RunResult:
    """Train a recipe (a preset's name or a YAML file) and return where the run lies and what it reached."""
    if devices != 1:
        raise UsageError(f"--devices {devices}: several devices are not built yet", then="leave --devices out")
    world = World.from_environment()
    given = [*overrides, *([("data.path", str(data), "--data")] if data is not None else [])]
    resolved = load(str(recipe), given).recipe
    earlier = existing_run(resolved, out=_path(out), runs=Path(runs)) if resume else None
    resolved = parts.with_data_path(resolved, known_data_path(earlier) if earlier else None)
    require_packages(resolved.records)
    if not resume:  # a run that goes on no longer needs them
        refuse_absent_weights(resolved)
    sources = parts.open_sources(resolved)
    plan = make_plan(resolved, _facts(sources, world))
    refuse_profile_beyond_end(resolved, plan)
    parts.check_model(resolved, plan.num_classes)
    open_device(device)  # what cannot be planned or built leaves no run folder behind
    choice = choose_folder(resolved, out=_path(out), resume=resume, runs=Path(runs))
    with ExitStack() as stack:
        stack.enter_context(choice.folder.lock())
        said = check_same_run(choice.folder, resolved) if choice.exists else ()
        if choice.exists and choice.folder.is_finished() and not any(line.startswith("length") for line in said):
            return RunResult(choice.folder.path, read_summary(choice.folder.path), Exit.DONE)
        stop = stack.enter_context(StopRequest())
        job = prepare_job(resolved, sources, choice, device, world)
        log = stack.enter_context(EventLog(job.folder.events))
        observers = [on_event] if on_event is not None else []
        if console is not None:
            screen = make_console(console, job.folder.path)
            stack.callback(_say_result, screen, job.folder)
            observers.append(screen.observe)

        def emit(event: Event) -> None:
            stamped = log.write(event)
            for observe in observers:
                observe(stamped)

        records = Records(resolved, job.folder.path, emit)
        stack.callback(records.close)
        observers.append(records.observe)

        _announce(job, (*choice.notes, *said), command, emit)
        return run_job(job, stop, emit)


def _say_result(screen: Observer, folder: RunFolder) -> None:
    """Give the terminal back with the result on it, however the run ended."""
    screen.close()
    if folder.summary.exists():
        screen.finish(read_summary(folder.path))


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def _facts(sources: parts.Sources, world: World, threads: int | None = None) -> Facts:
    return Facts(
        num_train=len(sources.train),
        num_val=len(sources.val),
        num_classes=len(sources.train.class_names),
        world_size=world.size,
        source=sources.train.kind,
        cores=threads or usable_cores(Machine()),
    )


def prepare_job(recipe: Recipe, sources: parts.Sources, choice: Choice, device_name: str, world: World) -> Job:
    """Find the point to resume from, make the plan and open the device."""
    point = find_restore_point(Store(choice.folder.checkpoints)) if choice.exists else RestorePoint(None, ())
    state = point.state
    if state and state["data_fingerprint"] != sources.fingerprint():
        raise RecipeError(
            "the data has changed since this run was started",
            where=str(parts.data_path(recipe) or recipe.data.source),
            why="files were added, removed or relabelled",
            then="point --data at the data of the first command, or start a new run without --resume",
        )
    plan = make_plan(recipe, _facts(sources, world, state.get("threads")))
    device = open_device(device_name, threads=plan.threads)
    device.autotune(recipe.engine.autotune)
    if torch.are_deterministic_algorithms_enabled() != recipe.engine.deterministic:
        # Only when it changes: the call imports torch's compiler, which takes seconds.
        torch.use_deterministic_algorithms(recipe.engine.deterministic)
    write_whole(choice.folder.recipe, dump(recipe))
    choice.folder.summary.unlink(missing_ok=True)  # what an earlier attempt reached says nothing of this one
    return Job(recipe, plan, sources, device, world, choice.folder, point)


def _announce(job: Job, notes: Sequence[str], command: Sequence[str], emit: Callable[[Event], None]) -> None:
    """Record the attempt, the plan and what a person should know before the first step."""
    state = job.point.state
    attempts = sum(isinstance(event, Attempt) for event in read_events(job.folder.events))
    emit(Attempt(attempts + 1, int(state.get("step", 0)), tuple(command), _environment(job)))
    changed = [
        f"{name} was {state[name]}, is {now}: bitwise equality with the first attempt is not promised"
        for name, now in (("threads", job.plan.threads), ("device", job.device.kind))
        if state and state[name] != now
    ]
    for text in (*job.point.notes, *notes, *changed):
        emit(Noted("info", text, int(state.get("step", 0))))


def _environment(job: Job) -> dict[str, Any]:
    return {
        "reconv": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": job.device.describe(),
        "threads": job.plan.threads,
        "host": platform.node(),
        "system": platform.platform(),
        "data": job.sources.train.origin,
        "data fingerprint": job.sources.train.fingerprint()[:16],
    }


def run_job(job: Job, stop: StopRequest, emit: Callable[[Event], None]) -> RunResult:
    """Build the parts, run the loop, and wind down whatever happens."""
    first_step = int(job.point.state.get("step", 0))
    start_s, clock, counters = time.perf_counter(), Clock(), Counters(first_step)
    code: int = Exit.UNEXPECTED
    reason = "unexpected error"
    told: dict[str, Any] = {}
    trace = build_trace(job.recipe, job.folder, job.device, first_step, emit, clock)
    try:
        fit, evaluation = _assemble(job, stop, emit, clock, trace)
        counters = fit.counters
        fit.run()
        if fit.ended_early:
            emit(Noted("info", f"ended early: {fit.ended_early}", counters.step))
        told = {
            "stopped_early": fit.ended_early or None,
            **average_at_end(job.recipe, job.plan, job.folder, counters.step, evaluation, emit),
        }
        if job.plan.evaluate is not None:
            parts.picture_mistakes(evaluation, job.sources, job.folder, job.recipe, counters.step, emit)
        code, reason = Exit.DONE, f"finished early: {fit.ended_early}" if fit.ended_early else "finished"
    except ReconvError as error:
        code, reason = error.code, error.what
        raise
    except KeyboardInterrupt:
        code, reason = Exit.INTERRUPTED, "interrupted without a save"
        raise
    except Exception as error:
        if is_out_of_memory(error):
            code, reason = Exit.RESOURCES, "out of memory"
            raise ResourceError(
                "out of memory",
                where=job.device.describe(),
                why=f"micro-batches of {job.plan.micro_batch} images do not fit",
                then=f"halve them: --set batch.micro={max(1, job.plan.micro_batch // 2)}",
            ) from error
        raise
    finally:
        trace.close()
        steps_done = max(0, counters.step - first_step)
        emit(
            Ended(
                step=counters.step,
                exit_code=int(code),
                reason=reason,
                wall_s=time.perf_counter() - start_s,
                images=steps_done * job.plan.global_batch,
                peak_memory_bytes=job.device.peak_memory_bytes(),
                train_s=clock.train_s,
                wait_s=clock.wait_s,
                timed_images=clock.timed_images,
                fields=told,
            )
        )
        _write_results(job.folder)
    return RunResult(job.folder.path, read_summary(job.folder.path), int(code))


def _write_results(folder: RunFolder) -> None:
    """The summary and the report; a disk that has no room for them must not hide why the run ended."""
    ending = sys.exc_info()[1]
    try:
        write_summary(folder.path)
        write_report(folder.path)
    except OSError as error:
        if ending is None:
            raise
        ending.add_note(f"the summary and report could not be written: {error}")


def _assemble(
    job: Job, stop: StopRequest, emit: Callable[[Event], None], clock: Clock, trace: Trace
) -> tuple[Fit, parts.Evaluation]:
    """The parts of the run, restored to where it left off."""
    recipe, plan, device = job.recipe, job.plan, job.device
    network = parts.build_network(recipe, plan.num_classes, device)
    emit(
        Planned(
            recipe=recipe.name,
            task=recipe.task,
            model=recipe.model.name,
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            global_batch=plan.global_batch,
            lines=plan.lines,
            parameters=sum(p.numel() for p in network.model.parameters()),
        )
    )
    teacher = open_teacher(recipe, tuple(job.sources.train.class_names), device, job.point.state)
    is_resumed = job.point.loaded is not None
    notes = start_network(
        network, recipe, plan.num_classes, is_resumed=is_resumed, tell=lambda text: emit(Noted("info", text))
    )
    if recipe.model.init is None and not is_resumed and (said := parts.whiten(network, recipe, job.sources.train)):
        notes.append(said)
    for text in (*notes, *([teacher.note] if teacher else [])):
        emit(Noted("info", text, int(job.point.state.get("step", 0))))
    network.model.train()
    task = parts.build_task(recipe, plan.num_classes, teacher.teacher if teacher else None)
    rounding = parts.build_rounding(recipe)
    optimizer = build_optimizer(recipe.optimizer, network.model, alpha=plan.alpha, rounding=rounding)
    average = Ema(network.model, recipe.ema.decay, recipe.ema.ramp) if recipe.ema.decay > 0 else None
    evaluation = parts.Evaluation(
        network=network,
        average=average,
        task=task,
        loader=parts.eval_loader(recipe, job.sources.val, device, plan.eval_batch, plan.workers),
        prepare=parts.eval_prepare(recipe, network),
        num_samples=plan.num_val,
        tta=recipe.evaluate.tta,
    )
    saver = parts.Saver(
        folder=job.folder,
        store=Store(job.folder.checkpoints),
        recipe=recipe,
        plan=plan,
        network=network,
        optimizer=optimizer,
        average=average,
        about=parts.about_checkpoint(recipe, plan, job.sources, device, teacher.fingerprint if teacher else None),
        metric=task.metric,
        chosen_weights=evaluation.chosen_weights,
        emit=emit,
    )
    counters = Counters()
    if job.point.loaded is not None:
        saver.restore(job.point.loaded.parts)
        state = job.point.state
        counters = Counters(state["step"], list(state["history"]), state["skipped"])

    def rate(step: int) -> float:
        return learning_rate(plan.schedule, step)

    prepare = parts.PicturedFirstBatch(
        prepare=TrainPrepare(
            recipe.data.preprocess,
            recipe.augment,
            plan.num_classes,
            network.precision.input_dtype,
            network.channels_last,
        ),
        recipe=recipe,
        folder=job.folder,
        class_names=tuple(job.sources.train.class_names),
        emit=emit,
        done=counters.step > 0,
    )
    step = PlainStep(
        model=network.forward,
        task=task,
        prepare=prepare,
        layers=network.layers,
        precision=network.precision,
        optimizer=optimizer,
        average=average,
        world=job.world,
        rate=rate,
        ordered=recipe.parallel.reduce == "ordered",
        mark=trace.mark,
    )
    watch = Watch(
        device,
        emit,
        policy=recipe.engine.non_finite.policy,
        budget=recipe.engine.non_finite.budget,
        loss_scale=lambda: network.precision.loss_scale if network.precision.expects_overflow else None,
        skipped=counters.skipped,
    )
    fit = Fit(
        plan=plan,
        task=task,
        step=trace.step(step),
        rate=rate,
        batches=trace.batches(TrainLoader(job.sources.train, recipe, plan, device.move)),
        evaluate=evaluation,
        save=saver if plan.save is not None else None,
        watch=watch,
        clock=clock,
        device=device,
        emit=emit,
        stop=stop,
        counters=counters,
        metric=task.metric,
        chosen_weights=evaluation.chosen_weights,
        metrics_note="on mixed images" if recipe.augment.mixes else "",
        keep_best=recipe.save.keep_best,
        loss_scale=lambda: network.precision.loss_scale,
        early=parts.build_early_stop(recipe),
    )
    return fit, evaluation
