"""`train`: a recipe becomes a plan, parts, a loop, and a run folder with a summary and a report.

Owns the order in which a run is set up and wound down. Refuses to know how any part works. Invariant: whatever
happens after the run folder is claimed ends with an `end` event, a summary and a report.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from reconv import __version__
from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.store import CheckpointStore
from reconv.data.decode.native import choose_decoder, native_support
from reconv.data.stage_timing import StageTimes
from reconv.device import configure_algorithms, device_kind, open_device
from reconv.device.affinity import cpu_affinity
from reconv.distributed.environment import LaunchEnv, must_launch, read_launch_env
from reconv.distributed.failure import report_failures
from reconv.distributed.nic import choose_nic
from reconv.distributed.process_group import ProcessGroup, open_process_group
from reconv.environment_checks import Machine, available_memory_bytes, cores_of_one, usable_cores
from reconv.errors import ExitCode, RecipeError, ReconvError, UsageError
from reconv.io.atomic import write_atomic
from reconv.logging.clock import RunClock
from reconv.logging.events import AttemptStarted, Event, read_events
from reconv.logging.run_logger import RunLogger, open_run_logger
from reconv.metrics.detection_metrics import DetectionMetrics
from reconv.recipe.data_fields import Decoder
from reconv.recipe.loader import Override, dump
from reconv.recipe.plan import Facts, make_plan
from reconv.recipe.schema import Recipe
from reconv.report.summary import read_summary
from reconv.trainer.build.data_context import DataWaitLogger, gpu_decode_share, open_data_context
from reconv.trainer.build.datasets import Datasets, cache_size, data_path, open_datasets, with_cache
from reconv.trainer.build.network import check_model
from reconv.trainer.build.task_builder import check_scores, with_boxes
from reconv.trainer.build.train_state import TrainingRun, assemble
from reconv.trainer.checkpoint_average import average_at_end
from reconv.trainer.detection_findings import tell_findings
from reconv.trainer.evaluator import Evaluation
from reconv.trainer.micro_batch import settle_micro
from reconv.trainer.profile_steps import build_trace, refuse_profile_beyond_end
from reconv.trainer.report_images import picture_mistakes
from reconv.trainer.resume import ChosenRunDir, RestorePoint, find_restore_point, refuse_taken
from reconv.trainer.run_finalizer import RunFinalizer
from reconv.trainer.run_setup import (
    RunArgs,
    claim_folder,
    refuse_devices,
    refuse_different_data,
    resolve,
    topology,
)
from reconv.trainer.stop_signal import StopSignal

_SAVE_LINGERS_S = 20.0  # of a process that ends because another is lost; survivors end within a minute


@dataclass(frozen=True, slots=True)
class RunResult:
    """What a finished `train` leaves behind."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int
    was_finished: bool = False  # before: nothing was done


def train(
    recipe: str | Path,
    *,
    data: str | Path | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    devices: int | None = None,
    nic: str | None = None,
    console: str | None = None,
    on_event: Callable[[Event], None] | None = None,
    runs: str | Path = "runs",
    command: Sequence[str] = (),
) -> RunResult:
    """Train a recipe (a preset's name or a YAML file) and return where the run lies and what it reached."""
    start = RunArgs(str(recipe), data, tuple(overrides), resume, _path(out), Path(runs))
    launch_env = read_launch_env()
    if devices is not None and must_launch(devices, launch_env):
        return _launch(devices, start, device, nic, console, on_event, tuple(command))
    choose_nic(nic)
    return _train(start, launch_env, device, console, on_event, command)


def _launch(
    devices: int,
    start: RunArgs,
    device: str,
    nic: str | None,
    console: str | None,
    on_event: Callable[[Event], None] | None,
    command: Sequence[str],
) -> RunResult:
    """Train in so many processes of this machine."""
    from reconv.distributed.launcher import launch  # torch's launcher, which one process does not need

    if on_event is not None:
        raise UsageError("events of several processes cannot be observed from here", then="read events.jsonl instead")
    refuse_devices(devices, device, resolve(start))
    refuse_taken(start.out, start.resume)
    return launch(devices, _train_rank, start, device, nic, console, command)


def _train_rank(start: RunArgs, device: str, nic: str | None, console: str | None, command: Sequence[str]) -> RunResult:
    """One of several processes that were started here."""
    choose_nic(nic)
    return _train(start, read_launch_env(), device, console, None, command)


def _train(
    start: RunArgs,
    launch_env: LaunchEnv,
    device: str,
    console: str | None,
    on_event: Callable[[Event], None] | None,
    command: Sequence[str],
) -> RunResult:
    """Train in this process, alone or with the others."""
    start = start.again(launch_env)
    process_group = open_process_group(launch_env, device_kind(device))
    with ExitStack() as stack:
        stack.enter_context(report_failures(process_group))
        resolved = process_group.on_rank0(lambda: resolve(start))
        process_group.set_phase("opening the data")
        sources = open_kept_sources(resolved, process_group)
        refuse_different_data(process_group, sources)
        process_group.on_rank0(lambda: refuse_unplannable(resolved, sources, process_group))
        # What cannot be planned or built leaves no run folder behind.
        opened = open_device(device, local_rank=launch_env.local_rank)
        cpus = stack.enter_context(
            cpu_affinity(
                resolved.engine.cpu_affinity,
                opened.pci_address,
                local_rank=launch_env.local_rank,
                local_world_size=launch_env.local_world_size,
            )
        )
        process_group.set_phase("opening the run folder")
        claim = process_group.on_rank0(lambda: claim_folder(start, resolved, stack, launch_env))
        if claim.is_finished:
            return RunResult(claim.choice.folder.path, claim.summary, ExitCode.OK, was_finished=True)
        stop = stack.enter_context(StopSignal())
        job = prepare_job(resolved, sources, claim.choice, device, process_group)
        logger = stack.enter_context(
            open_run_logger(
                job.folder,
                resolved,
                rank=process_group.rank,
                world_size=process_group.world_size,
                console=console,
                on_event=on_event,
            )
        )
        for line in topology(process_group, job.device.describe()):
            logger.info(line)
        _announce(job, (*claim.choice.notes, *claim.said, *filter(None, [cpus])), command, logger)
        return run_job(job, stop, logger)


def refuse_unplannable(recipe: Recipe, sources: Datasets, process_group: ProcessGroup) -> None:
    """Refuse what cannot be planned or built."""
    plan = make_plan(recipe, _facts(sources, process_group, {}, choose_decoder(recipe.augment.decoder)))
    refuse_profile_beyond_end(recipe, plan)
    check_model(recipe, plan.num_classes)
    check_scores(recipe)


def _path(value: str | Path | None) -> Path | None:
    return None if value is None else Path(value)


def open_kept_sources(recipe: Recipe, process_group: ProcessGroup) -> Datasets:
    """The sets a run reads, kept in memory where the recipe wants that."""
    return with_cache(recipe, open_datasets(recipe), available_memory_bytes(Machine()), process_group.world_size)


def _facts(
    sources: Datasets, process_group: ProcessGroup, state: Mapping[str, Any], decoder: Decoder, device: str = ""
) -> Facts:
    return Facts(
        num_train=len(sources.train),
        num_val=len(sources.val),
        num_val_left_out=sources.num_val_left_out,
        num_classes=len(sources.train.class_names),
        world_size=process_group.world_size,
        source=sources.train.kind,
        cores=state.get("threads") or cores_of_one(Machine(), process_group.launch_env.local_world_size),
        cache=cache_size(sources),
        decoder=decoder,
        device=device,
    )


def prepare_job(
    recipe: Recipe, sources: Datasets, choice: ChosenRunDir, device_name: str, process_group: ProcessGroup
) -> TrainingRun:
    """Find the point to resume from, make the plan and open the device."""
    point = RestorePoint(None, ())
    if choice.exists:
        point = process_group.on_rank0(lambda: find_restore_point(CheckpointStore(choice.folder.checkpoints)))
    state = point.state
    if state and state["data_fingerprint"] != sources.fingerprint():
        raise RecipeError(
            "the data has changed since this run was started",
            where=str(data_path(recipe) or recipe.data.source),
            why="files were added, removed or relabelled",
            then="point --data at the data of the first command, or start a new run without --resume",
        )
    # Checkpoints that do not tell their decoder are older than the compiled one.
    kept = state.get("decoder", "pillow") if state else None
    decoder = choose_decoder(recipe.augment.decoder, kept, process_group.all_gather(native_support()))
    facts = _facts(sources, process_group, state, decoder, device_kind(device_name))
    plan = make_plan(recipe, facts)
    device = open_device(device_name, plan.threads, process_group.launch_env.local_rank)
    kept_share = state.get("gpu_share", 0.0) if state else None
    share = process_group.on_rank0(lambda: gpu_decode_share(recipe, plan, sources.train, device, kept_share))
    plan = make_plan(recipe, replace(facts, gpu_share=share))
    configure_algorithms(device, recipe.engine)
    if process_group.is_rank0:
        write_atomic(choice.folder.recipe, dump(recipe))
        choice.folder.summary.unlink(missing_ok=True)  # what an earlier attempt reached says nothing of this one
    return settle_micro(TrainingRun(recipe, plan, sources, device, process_group, choice.folder, point))


def _announce(job: TrainingRun, notes: Sequence[str], command: Sequence[str], logger: RunLogger) -> None:
    """Record the attempt, the plan and what a person should know before the first step."""
    state = job.point.state
    attempts = 0
    if job.process_group.is_rank0:
        attempts = sum(isinstance(event, AttemptStarted) for event in read_events(job.folder.events))
    logger.log(AttemptStarted(attempts + 1, int(state.get("step", 0)), tuple(command), _environment(job)))
    changed = [
        f"{name} was {state[name]}, is {now}: bitwise equality with the first attempt is not promised"
        for name, now in (("threads", job.plan.threads), ("device", job.device.kind))
        if state and state[name] != now
    ]
    for text in (*job.point.notes, *notes, *changed):
        logger.info(text, int(state.get("step", 0)))


def _environment(job: TrainingRun) -> dict[str, Any]:
    return {
        "reconv": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": job.device.describe(),
        "threads": job.plan.threads,
        "JPEG decoder": job.plan.decoder,
        **({"share of the GPU's JPEG engine": job.plan.gpu_share} if job.plan.gpu_share else {}),
        "host": platform.node(),
        "system": platform.platform(),
        "data": job.sources.train.origin,
        "data fingerprint": job.sources.train.fingerprint()[:16],
    }


def run_job(job: TrainingRun, stop: StopSignal, logger: RunLogger) -> RunResult:
    """Build the parts, run the loop, and wind down whatever happens."""
    clock, writer = RunClock(), AsyncWriter()
    ending = RunFinalizer(job, clock, logger)
    trace = build_trace(job.recipe, job.folder, job.device, ending.first_step, logger, clock)
    waiting = _waiting(job, clock, logger)
    logger.subscribe(waiting.on_event)

    def end_without_peer(error: ReconvError) -> None:
        writer.join(_SAVE_LINGERS_S)
        ending.tell_error(error)

    job.process_group.on_lost_rank(job.recipe.parallel.heartbeat_timeout_s, end_without_peer)
    with ExitStack() as winding_down:  # what comes last is done first
        winding_down.callback(ending.tell)
        winding_down.callback(lambda: waiting.log(ending.counters.step))
        winding_down.callback(trace.close)
        with (
            ending.named(),
            open_data_context(job.recipe, job.plan, job.device, waiting.stage_times) as context,
            writer,
        ):
            fit, evaluation = assemble(job, stop, logger, clock, trace, context, writer)
            ending.counters = fit.counters
            fit.run()
            ending.ended_early = fit.ended_early
            _finish(job, evaluation, ending, logger)
    return RunResult(
        job.folder.path, job.process_group.on_rank0(lambda: read_summary(job.folder.path)), int(ending.code)
    )


def _finish(job: TrainingRun, evaluation: Evaluation, ending: RunFinalizer, logger: RunLogger) -> None:
    """What is done once after the last step."""
    step = ending.counters.step
    if ending.ended_early:
        logger.info(f"ended early: {ending.ended_early}", step)
    ending.fields = {
        "stopped_early": ending.ended_early or None,
        **average_at_end(job.recipe, job.plan, job.folder, job.process_group, step, evaluation, logger),
    }
    if job.plan.evaluate is not None and job.process_group.is_rank0:
        _show_mistakes(job, evaluation, step, logger)


def _show_mistakes(job: TrainingRun, evaluation: Evaluation, step: int, logger: RunLogger) -> None:
    """What the report shows of the last evaluation besides numbers."""
    if isinstance(evaluation.last, DetectionMetrics):
        source, weights = with_boxes(job.sources.val), evaluation.last_weights
        tell_findings(evaluation.last, source, job.folder, step, weights, evaluation.is_partial, logger)
    else:
        picture_mistakes(evaluation, job.sources, job.folder, job.recipe, step, logger)


def _waiting(job: TrainingRun, clock: RunClock, logger: RunLogger) -> DataWaitLogger:
    source, cores = job.sources.train.kind, usable_cores(Machine())
    return DataWaitLogger(job.recipe, job.plan, source, cores, clock, StageTimes(), logger)
