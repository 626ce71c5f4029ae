"""A training run, from its directory to its end: set up once, for training, dry runs, benchmarks and Python.

    with TrainingRun.open("quickstart", data="images/", out="runs/mine") as run:
        run.trainer().fit()
    print(run.result.summary)

If planning or building fails, no run directory is created. Once there is one, the run always ends with a `RunEnded`
event, a summary and a report.

Stopped after any step and resumed, a run ends with the bits of an uninterrupted one, on the CPU with equal threads
(tests/laws/test_law_resume.py).
"""

from __future__ import annotations

import platform
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from reconv.build.checks import describe_ranks
from reconv.build.code import code_digests, describe_changed_code, describe_python_objects
from reconv.build.data import build_bad_samples, build_eval_loader, build_train_loader, open_data_context
from reconv.build.init_weights import check_init
from reconv.build.model import build_graph_capture
from reconv.build.task import build_loss, check_class_weights, check_metric
from reconv.build.teacher import read_teacher
from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.run_identity import RunIdentity, read_identity, write_identity
from reconv.checkpoint.store import folder_name
from reconv.core.compat import untested_note
from reconv.core.custom_code import code_errors
from reconv.core.errors import ExitCode, PreemptedError, ReconvError, UnreadableRunError, UsageError
from reconv.core.machine import Machine, usable_cores
from reconv.core.text import printable_lines
from reconv.core.version import __version__
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.data.pipeline.prefetcher import DataContext
from reconv.data.pipeline.train_loader import TrainLoader
from reconv.data.stage_timing import StageTimes
from reconv.device import device_error, is_out_of_memory
from reconv.logging.clock import RunClock
from reconv.logging.event_log import EventFile, read_event_file
from reconv.logging.events import AttemptStarted, Event, RunEnded
from reconv.logging.phases import Phase, phase_lines
from reconv.logging.run_dir import RunDir, read_summary
from reconv.logging.run_logger import RunLogger, open_run_logger
from reconv.precision import check_precision
from reconv.recipe.load.identity import recipe_digest
from reconv.recipe.loader import Override, dump
from reconv.report.html import write_report
from reconv.report.summary import write_summary
from reconv.storage.files import remove_temporaries, system_error, write_atomic
from reconv.trainer.callbacks.base import TrainerCallback
from reconv.trainer.callbacks.checkpoint_average import CheckpointAveraging
from reconv.trainer.callbacks.custom import CustomCallbacks, check_callbacks
from reconv.trainer.callbacks.data_wait import DataFingerprintLogger, DataWaitLogger
from reconv.trainer.callbacks.divergence_guard import DivergenceGuard
from reconv.trainer.callbacks.early_stopping import EarlyStopping
from reconv.trainer.callbacks.live_report import LiveReport
from reconv.trainer.callbacks.mirror_requests import MirrorRequests
from reconv.trainer.callbacks.nan_guard import NanGuard
from reconv.trainer.callbacks.profiler import StepProfiler, check_profile_range
from reconv.trainer.callbacks.report_images import ReportImages
from reconv.trainer.callbacks.slow_ranks import SlowRankLogger
from reconv.trainer.callbacks.unfreeze import UnfreezeBackbone
from reconv.trainer.checkpointer import RunCheckpointer
from reconv.trainer.evaluator import Evaluator
from reconv.trainer.liveness import LivenessFile
from reconv.trainer.loop import Trainer
from reconv.trainer.micro_batch import choose_micro_batch
from reconv.trainer.opened_run import (
    ExistingRun,
    create_run_dir,
)
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import PreparedRun, local_out, prepare_run, print_early
from reconv.trainer.progress import Counters, ProgressLogger
from reconv.trainer.step import (
    Annotate,
    MicroBatchSize,
    TrainStep,
    build_train_step,
    no_annotation,
    out_of_memory_error,
)
from reconv.trainer.stop import StopAfter, StopSignal
from reconv.trainer.train_state import TrainState, build_train_state
from reconv.trainer.verifier import Verifier

if TYPE_CHECKING:
    from reconv.trainer.loop import Trainer
    from reconv.trainer.prepare import PreparedRun


_SAVE_GRACE_S = 20.0  # to finish a checkpoint when another rank is lost; the surviving ranks exit within a minute


def run_training(args: RunOptions, on_event: Callable[[Event], None] | None) -> RunOutcome:
    """Train as the arguments say, in this process; `run_on_devices` starts it in several."""
    run: TrainingRun | None = None
    try:
        with TrainingRun.from_args(args, on_event) as run:
            if not run.is_finished:
                with code_errors():
                    run.trainer().fit()
    except PreemptedError as error:
        if not args.return_when_interrupted or run is None or run.stop_signal.signal_number != signal.SIGINT:
            raise
        return RunOutcome(run.run_dir.path, read_summary(run.run_dir.path), int(error.code))
    return run.result


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun(PreparedRun):
    """A run with its run directory and logger; `trainer` builds its `Trainer`."""

    run_dir: RunDir
    logger: RunLogger
    clock: RunClock
    stop_signal: StopSignal
    finalizer: RunFinalizer
    stack: ExitStack  # closes what `trainer` opens
    stop_after: StopAfter = field(default_factory=StopAfter)

    @classmethod
    def open(
        cls,
        recipe: str | Path,
        overrides: Sequence[Override] = (),
        *,
        data: str | Path | None = None,
        out: str | Path | None = None,
        resume: bool = False,
        runs: str | Path = "runs",
        device: str = "auto",
        console: str | None = None,
        on_event: Callable[[Event], None] | None = None,
    ) -> AbstractContextManager[TrainingRun]:
        """Set up a run of a preset or a YAML file; the run directory is `out` or a new one in `runs`."""
        out, mirror = local_out(out, runs)
        args = RunOptions(
            str(recipe), tuple(overrides), data, out, resume, Path(runs), device, console=console, mirror=mirror
        )
        return cls.from_args(args, on_event)

    @classmethod
    @contextmanager
    def from_args(cls, args: RunOptions, on_event: Callable[[Event], None] | None = None) -> Iterator[TrainingRun]:
        """Set up the run that a command describes."""
        with ExitStack() as stack:
            prepared = stack.enter_context(prepare_run(args))
            if prepared.existing is not None and prepared.existing.is_finished:
                yield cls._open_finished(prepared, prepared.existing, stack)
                return
            process_group = prepared.process_group
            stop_after = _parse_stop_after(args, prepared)
            log_early = partial(print_early, args.console)
            notes = process_group.on_rank0(lambda: _check_recipe(prepared, stop_after, log_early))
            stop_signal = stack.enter_context(StopSignal())
            prepared = choose_micro_batch(replace(prepared, notes=(*prepared.notes, *notes)))
            run_dir = process_group.on_rank0(lambda: _open_run_dir(args, prepared, stack))
            if prepared.mirror is not None:
                stack.enter_context(prepared.mirror)  # copies what is written when the run ends
                prepared.mirror.start(run_dir)
            logger = stack.enter_context(
                open_run_logger(
                    run_dir,
                    prepared.recipe,
                    rank=process_group.rank,
                    world_size=process_group.world_size,
                    console=args.console,
                    on_event=on_event,
                )
            )
            _log_start(prepared, run_dir, args.command, logger)
            clock = RunClock(phases=prepared.phases, record_event=prepared.device.record_event)
            finalizer = RunFinalizer(prepared, run_dir, clock, logger)
            stack.enter_context(finalizer.finalize())
            yield cls(
                **_fields(prepared),
                run_dir=run_dir,
                logger=logger,
                clock=clock,
                stop_signal=stop_signal,
                finalizer=finalizer,
                stack=stack,
                stop_after=stop_after,
            )

    @classmethod
    def _open_finished(cls, prepared: PreparedRun, existing: ExistingRun, stack: ExitStack) -> TrainingRun:
        """A run that has nothing left to do; nothing is logged."""
        if prepared.mirror is not None:
            stack.enter_context(prepared.mirror)  # what is missing in its copy
            prepared.mirror.start(existing.run_dir)
        logger, clock = RunLogger(), RunClock()
        finalizer = RunFinalizer(prepared, existing.run_dir, clock, logger)
        finalizer.result = RunOutcome(existing.run_dir.path, existing.summary, ExitCode.OK, was_finished=True)
        return cls(
            **_fields(prepared),
            run_dir=existing.run_dir,
            logger=logger,
            clock=clock,
            stop_signal=StopSignal(),
            finalizer=finalizer,
            stack=stack,
        )

    @property
    def is_finished(self) -> bool:
        """True if the run that was to be resumed is already finished."""
        return self.existing is not None and self.existing.is_finished

    @property
    def result(self) -> RunOutcome:
        """Outcome of the run; available after the `with` block."""
        if self.finalizer.result is None:
            raise RuntimeError("the result is only available after the `with` block")
        return self.finalizer.result

    def trainer(self) -> Trainer:
        """Build the trainer; that of a resumed run continues from its checkpoint."""
        if self.is_finished:
            raise UsageError(f"{self.run_dir.path} is finished", hint="start a new run, or extend it with --epochs")
        self.phases.enter(Phase.MODEL)
        stage_times = StageTimes()
        writer = AsyncWriter()
        self._exit_when_rank_is_lost(writer)
        context = self.stack.enter_context(open_data_context(self.recipe, self.plan, self.device, stage_times))
        self.stack.enter_context(writer)

        profiler = StepProfiler.for_run(self)
        train_state = build_train_state(self, self.logger)
        bad_samples = build_bad_samples(self.recipe, self.restore_point.state, self.logger, self.process_group)
        micro_batch_size = MicroBatchSize(self.plan.micro_groups)
        verifier = Verifier.for_run(self, train_state)
        counters = self._restore(train_state)
        guard = DivergenceGuard(self.recipe, self.plan, self.run_dir.path, counters.divergence)
        # Graphs of steps and evaluations share their memory; a step that is built again has a capture of its own.
        graph_capture = build_graph_capture(self.recipe, self.device, self.process_group)
        annotate = no_annotation if self.recipe.profile == "off" else profiler.annotate
        slow_ranks = self._slow_ranks(annotate)
        build_step = partial(
            build_train_step,
            self,
            train_state,
            self.logger,
            annotate=annotate if slow_ranks is None else slow_ranks.annotate,
            micro_batch_size=micro_batch_size,
            digests=None if verifier is None else verifier.digests,
        )
        eval_loader = self._eval_loader(bad_samples, context)
        trainer = Trainer(
            plan=self.plan,
            step=build_step(graph_capture=graph_capture),
            loader=self._train_loader(bad_samples, context),
            evaluator=Evaluator(self, train_state, eval_loader, bad_samples, graph_capture),
            checkpointer=RunCheckpointer(self, train_state, bad_samples, micro_batch_size, writer),
            progress=ProgressLogger(self, train_state),
            logger=self.logger,
            clock=self.clock,
            process_group=self.process_group,
            stop_signal=self.stop_signal,
            callbacks=[
                profiler,
                *([] if slow_ranks is None else [slow_ranks]),
                self._nan_guard(train_state, counters, guard),
                guard,
                *self._unfreeze(train_state, build_step),
                *self._callbacks(stage_times, counters),
            ],
            counters=counters,
            verifier=verifier,
            stop_after=self.stop_after,
            liveness=LivenessFile(self.run_dir.alive if self.process_group.is_rank0 else None),
        )
        trainer.liveness.touch()
        self.finalizer.trainer = trainer
        return trainer

    def _exit_when_rank_is_lost(self, writer: AsyncWriter) -> None:
        def on_lost_rank(error: ReconvError) -> None:
            writer.join(_SAVE_GRACE_S)
            self.finalizer.log_error(error)

        self.process_group.on_lost_rank(self.recipe.parallel.heartbeat_timeout_s, on_lost_rank)

    def _restore(self, train_state: TrainState) -> Counters:
        """Load the checkpoint into the train state; returns the counters to continue with."""
        if self.restore_point.imported is not None:
            train_state.load_imported(self.restore_point.imported)
            return Counters(self.restore_point.step)
        if self.restore_point.loaded is None:
            return Counters()
        source = self.run_dir.checkpoints / folder_name(self.restore_point.step)
        train_state.load_state_dict(self.restore_point.loaded.parts, source=str(source))
        return Counters.from_state(self.restore_point.state)

    def _train_loader(self, bad_samples: BadSamples, context: DataContext) -> TrainLoader:
        replica = (
            self.process_group.rank // self.recipe.parallel.pipeline_stages
        )  # all stages of a pipeline read the same
        return build_train_loader(self.recipe, self.plan, self.datasets.train, context, bad_samples, replica)

    def _eval_loader(self, bad_samples: BadSamples, context: DataContext) -> EvalLoader:
        plan = self.plan
        return build_eval_loader(
            self.recipe,
            self.datasets.val,
            self.device,
            plan.eval_batch,
            plan.workers,
            bad_samples,
            self.process_group,
            context,
            keeps_decoded=self.recipe.engine.verify == "off",  # kept batches have no digests
        )

    def _nan_guard(self, train_state: TrainState, counters: Counters, guard: DivergenceGuard) -> NanGuard:
        config, precision = self.recipe.engine.non_finite, train_state.network.precision
        return NanGuard(
            self.device,
            self.logger,
            policy="skip" if guard.replaces_nan_guard else config.policy,
            max_skipped=sys.maxsize if guard.replaces_nan_guard else config.max_skipped,
            loss_scale=lambda: precision.loss_scale if precision.expects_overflow else None,
            skipped=counters.skipped,
            all_gather=self.process_group.all_gather,
            on_loss=guard.add_loss,
        )

    def _slow_ranks(self, annotate: Annotate) -> SlowRankLogger | None:
        if not self.process_group.is_distributed:
            return None
        return SlowRankLogger(self.process_group, self.clock, self.logger, self.device.record_event, annotate)

    def _unfreeze(self, train_state: TrainState, build_step: Callable[[], TrainStep]) -> list[TrainerCallback]:
        backbone = train_state.frozen_backbone
        return [] if backbone is None else [UnfreezeBackbone(self.plan.freeze_steps, backbone, build_step)]

    def _callbacks(self, stage_times: StageTimes, counters: Counters) -> list[TrainerCallback]:
        source, cores = self.datasets.train.kind, usable_cores(Machine())
        return [
            EarlyStopping.from_config(self.recipe.early_stopping),
            DataWaitLogger(self.recipe, self.plan, source, cores, self.clock, stage_times, self.logger),
            CheckpointAveraging(self),
            DataFingerprintLogger(self.datasets, self.logger),
            ReportImages(self),
            LiveReport(self),
            *([MirrorRequests(self.mirror, self.logger)] if self.mirror is not None else []),
            *([CustomCallbacks(self, configs, counters.callbacks)] if (configs := self.recipe.callbacks) else []),
        ]


def _fields(prepared: PreparedRun) -> dict[str, Any]:
    return {f.name: getattr(prepared, f.name) for f in fields(PreparedRun)}


def _parse_stop_after(args: RunOptions, run: PreparedRun) -> StopAfter:
    if args.stop_at is not None:
        if args.stop_after is not None:
            raise UsageError("--stop-after and --stop-at cannot be combined", hint="use one of them")
        return StopAfter.at(args.stop_at, run.plan)
    return StopAfter.parse(args.stop_after, first_step=run.restore_point.step, steps_per_epoch=run.plan.steps_per_epoch)


def _check_recipe(run: PreparedRun, stop_after: StopAfter, log: Callable[[str], None]) -> tuple[str, ...]:
    """Raise errors that would otherwise appear when there is a run directory, or late; returns notes for the log."""
    check_profile_range(run.recipe, run.plan, stop_after)
    check_metric(run.recipe)
    build_loss(run.recipe, run.plan.num_classes, run.device)
    check_callbacks(run.recipe)
    check_class_weights(run.recipe, run.datasets.train)
    check_precision(run.recipe.precision, run.device.kind)
    read_teacher(run.recipe, tuple(run.datasets.train.class_names), run.trust_code, log)
    return () if run.restore_point.is_resumed else check_init(run.recipe, run.plan.num_classes, log)


def _open_run_dir(args: RunOptions, run: PreparedRun, stack: ExitStack) -> RunDir:
    """The directory of the resumed run or a new one, with the recipe of this attempt."""
    if run.existing is not None:
        run_dir = run.existing.run_dir
    else:
        launch_env = run.process_group.launch_env
        run_dir = create_run_dir(run.recipe, out=args.out, runs=args.runs, stack=stack, launch_env=launch_env)
    remove_temporaries(run_dir.path)  # of an attempt that was killed
    text = dump(run.recipe)
    digest = recipe_digest(text)
    identity = RunIdentity.new(digest) if run.existing is None else read_identity(run_dir).with_recipe(digest)
    write_identity(run_dir, identity)  # first, so that a recipe never lacks its digest
    write_atomic(run_dir.recipe, text)
    run_dir.summary.unlink(missing_ok=True)  # that of an earlier attempt
    return run_dir


def _log_start(run: PreparedRun, run_dir: RunDir, command: Sequence[str], logger: RunLogger) -> None:
    """Log the ranks, the attempt, the notes and what has changed since the checkpoint."""
    state, step = run.restore_point.state, run.restore_point.step
    for line in describe_ranks(run.process_group, run.device.describe()):
        logger.info(line)
    past = read_event_file(run_dir.events) if run.process_group.is_rank0 else EventFile()
    attempts = [event.attempt for event in past.events if isinstance(event, AttemptStarted)]
    logger.log(AttemptStarted(max(attempts, default=0) + 1, step, tuple(command), _environment(run)))
    for problem in past.problems():
        logger.warning(f"{run_dir.path}: {problem}", step)
    changed = [
        f"{name} was {state[name]} and is now {now}: results may differ in the last bits"
        for name, now in (("threads", run.plan.threads), ("device", run.device.kind))
        if state and state[name] != now
    ]
    if note := untested_note(is_gpu=run.device.kind == "cuda"):
        logger.warning(note, step)
    for text in (*run.notes, *describe_python_objects(run.recipe), *changed):
        logger.info(text, step)
    for text in (*run.datasets.warnings, *describe_changed_code(state.get("code", {}), run.recipe)):
        logger.warning(text, step)


def _environment(run: PreparedRun) -> dict[str, Any]:
    return {
        "reconv": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "device": run.device.describe(),
        "threads": run.plan.threads,
        "JPEG decoder": run.plan.decoder,
        "host": platform.node(),
        "system": platform.platform(),
        "data": run.datasets.origins[0],
        **{f"sha256 of {name}": digest[:16] for name, digest in code_digests(run.recipe).items()},
    }


@dataclass(frozen=True, slots=True, repr=False)
class RunOutcome:
    """The run directory, its summary and its exit code."""

    folder: Path
    summary: dict[str, Any]
    exit_code: int
    was_finished: bool = False  # before this command, which had nothing to do


class RunFinalizer:
    """Logs the end of a run, once, in whatever way it ends."""

    def __init__(self, run: PreparedRun, run_dir: RunDir, clock: RunClock, logger: RunLogger) -> None:
        self._run = run
        self._run_dir = run_dir
        self._clock = clock
        self._logger = logger
        self._start_s = time.perf_counter()
        self._is_logged = False
        self._first_step = run.restore_point.step
        self.trainer: Trainer | None = None
        self.result: RunOutcome | None = None  # None until the run has ended
        self.fields: dict[str, Any] = {}  # further fields of the event and the summary
        self.exit_code = ExitCode.UNEXPECTED
        self.reason = "unexpected error"

    @contextmanager
    def finalize(self) -> Iterator[None]:
        """Log how the code inside ends, write summary and report, and keep the result."""
        try:
            with self.handle_errors():
                yield
        finally:
            self.log_end()
        self._run.process_group.on_rank0(self._logger.check)  # of the event log, if the end could not be written
        path = self._run_dir.path
        summary = self._run.process_group.on_rank0(lambda: read_summary(path))
        self.result = RunOutcome(path, summary, int(self.exit_code))

    @contextmanager
    def handle_errors(self) -> Iterator[None]:
        """Remember how the code inside ends; a lost rank and an out-of-memory error are raised as what they are."""
        try:
            yield
        except ReconvError as error:
            self.exit_code, self.reason = error.code, error.what
            raise
        except KeyboardInterrupt:
            self.exit_code, self.reason = ExitCode.INTERRUPTED, "interrupted without saving a checkpoint"
            raise
        except Exception as error:
            lost = self._run.process_group.diagnose(error)
            if lost is not None:
                self.exit_code, self.reason = lost.code, lost.what
                raise lost from error
            if is_out_of_memory(error):
                self.exit_code, self.reason = ExitCode.RESOURCES, "out of memory"
                raise out_of_memory_error(self._run) from error
            if (fault := device_error(error)) is not None:
                self.exit_code, self.reason = fault.code, fault.what
                raise fault from error
            if isinstance(error, OSError) and error.errno is not None:
                refused = system_error(error, self._run_dir.path)
                self.exit_code, self.reason = refused.code, refused.what
                raise refused from error
            raise
        self.exit_code, self.reason = ExitCode.OK, "finished"
        trainer = self.trainer
        self.fields["stopped_early"] = (trainer.stop_reason or None) if trainer is not None else None
        if trainer is not None and trainer.is_paused:
            self.fields["stopped_after"] = trainer.stop_after.text
            step, total = trainer.counters.step, trainer.plan.total_steps
            self.reason = (
                f"stopped after step {step} of {total} by {trainer.stop_after.option} {trainer.stop_after.text}"
            )
        elif trainer is not None and trainer.stop_reason:
            self.reason = f"stopped early: {trainer.stop_reason}"

    def log_end(self) -> None:
        """Log how the run ended and write its summary and report."""
        self._log_end(self.exit_code, self.reason)

    def log_error(self, error: ReconvError) -> None:
        """Log that this error ends the run; called from another thread when a rank is lost."""
        self._log_end(error.code, error.what)

    def _log_end(self, exit_code: ExitCode, reason: str) -> None:
        if self._is_logged:
            return
        self._is_logged = True
        step = self._first_step if self.trainer is None else self.trainer.counters.step
        phases = self._run.phases.seconds()
        if self._run.recipe.profile != "off":
            table = [f"where the time went, {sum(phases.values()):.2f} s so far:", *phase_lines(phases)]
            self._logger.info(printable_lines(*table), step)
        self._logger.log(
            RunEnded(
                step=step,
                exit_code=int(exit_code),
                reason=reason,
                wall_s=time.perf_counter() - self._start_s,
                images=max(0, step - self._first_step) * self._run.plan.global_batch,
                peak_memory_bytes=self._run.device.peak_memory_bytes(),
                train_s=self._clock.train_s,
                wait_s=self._clock.wait_s,
                timed_images=self._clock.timed_images,
                startup_s=self._clock.startup_s,
                phases=phases,
                fields=self.fields,
            )
        )
        if self._run.process_group.is_rank0:
            _write_results(self._run_dir)


def _write_results(run_dir: RunDir) -> None:
    """Write the summary and the report; a failing disk must not hide the error that ended the run."""
    error = sys.exc_info()[1]
    try:
        write_summary(run_dir.path)
        write_report(run_dir.path)
    except (OSError, UnreadableRunError) as write_error:
        if error is None:
            raise
        error.add_note(f"the summary and report could not be written: {write_error}")
