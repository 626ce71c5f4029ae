"""A job becomes a loop: the parts of a run, built one by one and restored to where the run left off.

Owns the order of building. Refuses to know folders, consoles and endings (train). Invariant: a resumed run is built
from the recipe exactly as a new one, and then takes the checkpoint's tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from functools import partial
from typing import ParamSpec, TypeVar

from reconv.checkpoint.async_writer import AsyncWriter
from reconv.checkpoint.run_dir import RunDir
from reconv.checkpoint.store import CheckpointStore
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.prefetcher import DataContext
from reconv.device import Device, is_out_of_memory
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.strategy import ParallelStrategy, PipelineConfig, StrategyConfig
from reconv.logging.clock import RunClock
from reconv.logging.events import RunPlanned
from reconv.logging.run_logger import RunLogger
from reconv.models.pipeline_split import split_stages
from reconv.optim import ModelEma
from reconv.recipe.plan import Plan
from reconv.recipe.schema import Recipe
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.build.init_weights import start_network
from reconv.trainer.build.network import Network, build_network, build_recorder, compile_ahead, train_prepare, whiten
from reconv.trainer.build.task_builder import boxes_left_out
from reconv.trainer.build.teacher import open_teacher
from reconv.trainer.checkpointer import Checkpointer, about_checkpoint
from reconv.trainer.cuda_graph import CapturedStep
from reconv.trainer.evaluator import Evaluation
from reconv.trainer.lr_schedule import learning_rate
from reconv.trainer.nan_guard import NanGuard
from reconv.trainer.oom import MicroBatchSize, OomRetry
from reconv.trainer.profiler import StepProfiler
from reconv.trainer.protocols import OptimizerProtocol
from reconv.trainer.report_images import PicturedFirstBatch
from reconv.trainer.resume import RestorePoint
from reconv.trainer.step import TrainStep
from reconv.trainer.stop_signal import StopSignal
from reconv.trainer.trainer import Counters, Trainer

P = ParamSpec("P")
R = TypeVar("R")
Mark = Callable[[str], AbstractContextManager[None]]  # names the part of a step that runs inside


AnyStep = TrainStep | CapturedStep


@dataclass(frozen=True, slots=True)
class TrainingRun:
    """Everything decided before the first part is built."""

    recipe: Recipe
    plan: Plan
    sources: Datasets
    device: Device
    process_group: ProcessGroup
    folder: RunDir
    point: RestorePoint


@dataclass(frozen=True, slots=True)
class TrainState:
    """What learns: the network, its task, and what moves its weights."""

    network: Network
    task: parts.AnyTask
    optimizer: OptimizerProtocol
    average: ModelEma | None
    teacher_fingerprint: str | None


def assemble(
    job: TrainingRun,
    stop: StopSignal,
    logger: RunLogger,
    clock: RunClock,
    trace: StepProfiler,
    context: DataContext,
    writer: AsyncWriter,
) -> tuple[Trainer, Evaluation]:
    """The loop of a run and its evaluation, restored to where the run left off."""
    learner = build_learner(job, logger)
    bad_samples = parts.build_bad_samples(job.recipe, job.point.state, logger, job.process_group)
    evaluation = build_evaluation(job, learner, bad_samples, context)
    fitting = MicroBatchSize(job.plan.micro_groups)
    saver = build_saver(job, learner, evaluation, logger, writer, fitting)
    counters = _restore(job, saver)
    network, recipe = learner.network, job.recipe
    step = fit_step(job, learner, build_step(job, learner, counters, logger, trace.mark), fitting, logger)
    copy_number = (
        job.process_group.rank // recipe.parallel.pipeline_stages
    )  # the processes of a pipeline read the same samples
    fit = Trainer(
        plan=job.plan,
        task=learner.task,
        step=_in_phase(job.process_group, "training", trace.step(step)),
        rate=lambda step: learning_rate(job.plan.schedule, step),
        batches=trace.batches(
            parts.train_loader(recipe, job.plan, job.sources.train, context, bad_samples, copy_number)
        ),
        evaluate=_in_phase(job.process_group, "evaluating", evaluation),
        save=None if job.plan.save is None else _saving(job.process_group, saver),
        settle_save=writer.wait,
        watch=build_watch(job, network, counters, logger),
        clock=clock,
        device=job.device,
        logger=logger,
        stop=stop,
        counters=counters,
        metric=learner.task.metric,
        chosen_weights=evaluation.chosen_weights,
        metrics_note="on mixed images" if recipe.augment.mixes else "",
        keep_best=recipe.save.keep_best,
        loss_scale=lambda: network.precision.loss_scale,
        early=parts.build_early_stop(recipe),
        agree=job.process_group.all_reduce_max,
    )
    return fit, evaluation


def _in_phase(process_group: ProcessGroup, phase: str, call: Callable[P, R]) -> Callable[P, R]:
    """The same, told to the other processes while it runs; between phases a process waits for data."""

    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        process_group.set_phase(phase)
        try:
            return call(*args, **kwargs)
        finally:
            process_group.set_phase("waiting for data")

    return run


def _saving(process_group: ProcessGroup, saver: Checkpointer) -> Callable[[Counters, str], None]:
    """Rank 0 saves; all processes hold the same, but for shares of the optimizer's state."""
    return _in_phase(process_group, "saving", saver if process_group.is_rank0 else saver.take_part)


def build_learner(job: TrainingRun, logger: RunLogger) -> TrainState:
    """The network with its starting weights, its task and its optimizer; what a person should know of it is told."""
    recipe, plan = job.recipe, job.plan
    network = build_network(recipe, plan.num_classes, job.device)
    logger.log(
        RunPlanned(
            recipe=recipe.name,
            task=recipe.task,
            model=recipe.model.name,
            total_steps=plan.total_steps,
            steps_per_epoch=plan.steps_per_epoch,
            global_batch_size=plan.global_batch,
            lines=plan.lines,
            num_parameters=sum(p.numel() for p in network.model.parameters()),
            num_devices=job.process_group.world_size,
        )
    )
    teacher = open_teacher(recipe, tuple(job.sources.train.class_names), job.device, job.point.state)
    for text in (*_start(job, network, logger), *([teacher.note] if teacher else [])):
        logger.info(text, int(job.point.state.get("step", 0)))
    network.model.train()
    if job.device.kind == "cuda" and job.process_group.world_size == 1 and network.forward is network.model:
        # Not with other processes, who add the gradients of one layer beside the backward pass of the next.
        network.precision.cast_weights_once(network.model)
    prepare = train_prepare(network, recipe, plan.num_classes, job.device)
    compile_ahead(network, prepare, recipe, job.device, plan.size_at(0), logger.warning)
    task = parts.build_task(recipe, job.sources.val, job.device, teacher.teacher if teacher else None)
    optimizer = parts.build_run_optimizer(recipe, plan.alpha, network.model, job.device, job.process_group)
    average = ModelEma(network.model, recipe.ema.decay, recipe.ema.warmup) if recipe.ema.decay > 0 else None
    return TrainState(network, task, optimizer, average, teacher.fingerprint if teacher else None)


def _start(job: TrainingRun, network: Network, logger: RunLogger) -> list[str]:
    """Give the network the weights it starts from."""
    recipe, is_resumed = job.recipe, job.point.loaded is not None
    notes = start_network(network, recipe, job.plan.num_classes, is_resumed=is_resumed, tell=logger.info)
    if recipe.model.init is None and not is_resumed and (said := whiten(network, recipe, job.sources.train)):
        notes.append(said)
    if said := boxes_left_out(job.sources.train, recipe.detection.max_gt_boxes):
        notes.append(said)
    if network.recomputed is not None:
        notes.append(network.recomputed.describe(job.plan.micro_batch))
    return notes


def build_evaluation(
    job: TrainingRun, learner: TrainState, bad_samples: BadSamples, context: DataContext
) -> Evaluation:
    recipe, plan = job.recipe, job.plan
    return Evaluation(
        network=learner.network,
        average=learner.average,
        task=learner.task,
        loader=parts.eval_loader(
            recipe, job.sources.val, job.device, plan.eval_batch, plan.workers, bad_samples, job.process_group, context
        ),
        prepare=parts.eval_prepare(recipe, learner.network),
        num_samples=plan.num_val,
        bad_samples=bad_samples,
        process_group=job.process_group,
        tta=recipe.evaluate.tta,
        is_partial=plan.num_val_left_out > 0,
        boundary=job.device.step_boundary,
    )


def build_saver(
    job: TrainingRun,
    learner: TrainState,
    evaluation: Evaluation,
    logger: RunLogger,
    writer: AsyncWriter,
    fitting: MicroBatchSize,
) -> Checkpointer:
    return Checkpointer(
        folder=job.folder,
        store=CheckpointStore(job.folder.checkpoints),
        recipe=job.recipe,
        plan=job.plan,
        network=learner.network,
        optimizer=learner.optimizer,
        average=learner.average,
        about=about_checkpoint(job.recipe, job.plan, job.sources, job.device, learner.teacher_fingerprint),
        metric=learner.task.metric,
        chosen_weights=evaluation.chosen_weights,
        logger=logger,
        bad_samples=evaluation.bad_samples,
        device=job.device,
        writer=writer,
        fitting=fitting,
    )


def _restore(job: TrainingRun, saver: Checkpointer) -> Counters:
    """Put the checkpoint's tensors back, if there is one, and return the counters to go on from."""
    if job.point.loaded is None:
        return Counters()
    saver.restore(job.point.loaded.parts)
    state = job.point.state
    return Counters(state["step"], list(state["history"]), state["skipped"])


def build_step(
    job: TrainingRun,
    learner: TrainState,
    counters: Counters,
    logger: RunLogger,
    mark: Mark,
    strategy: ParallelStrategy | None = None,
) -> AnyStep:
    """The step of a run, recorded as a graph where the device can and the recipe lets it."""
    recipe, plan, network = job.recipe, job.plan, learner.network
    prepare = train_prepare(network, recipe, plan.num_classes, job.device)
    strategy = strategy or parallelize(job, network)
    plain = TrainStep(
        model=strategy.wrap(network.forward),
        task=learner.task,
        prepare=PicturedFirstBatch(
            prepare=prepare,
            recipe=recipe,
            folder=job.folder,
            class_names=tuple(job.sources.train.class_names),
            logger=logger,
            done=counters.step > 0 or not job.process_group.is_rank0,
        ),
        layers=network.layers,
        precision=network.precision,
        optimizer=learner.optimizer,
        average=learner.average,
        strategy=strategy,
        rate=lambda step: learning_rate(plan.schedule, step),
        ordered=recipe.parallel.reduce == "ordered",
        mark=mark,
        boundary=job.device.step_boundary,
    )
    recorder = build_recorder(recipe, job.device, job.process_group)
    return plain if recorder is None else CapturedStep(plain, recorder)


def fit_step(
    job: TrainingRun, learner: TrainState, step: AnyStep, fitting: MicroBatchSize, logger: RunLogger
) -> AnyStep | OomRetry:
    """The step with micro-batches halved where they do not fit, if the recipe leaves their size open."""
    # Among several processes one alone cannot do a step again: the others are in the middle of theirs.
    if job.recipe.batch.micro != "auto" or job.process_group.world_size > 1:
        return step
    return OomRetry(
        step=step,
        fitting=fitting,
        layers=learner.network.layers,
        optimizer=learner.optimizer,
        is_out_of_memory=is_out_of_memory,
        release=job.device.release_memory,
        tell=lambda step, text: logger.warning(text, step),
    )


def parallelize(job: TrainingRun, network: Network) -> ParallelStrategy:
    """How the ranks train the network together."""
    parallel, plan = job.recipe.parallel, job.plan
    ordered = parallel.reduce == "ordered"
    ranks = range(plan.world_size)
    passes = tuple(len(plan.device_groups[rank] if ordered else plan.micro_batches(rank)) for rank in ranks)
    config = StrategyConfig(
        ordered, passes, plan.devices_per_group, round(parallel.bucket_cap_mb * 2**20), parallel.gradient_compression
    )
    if parallel.pipeline_stages > 1:
        config = replace(
            config,
            pipeline=PipelineConfig(partial(split_stages, splits=parallel.pipeline_splits), parallel.pipeline_schedule),
        )
    strategy = job.process_group.parallelize(network.model, config)
    group_all_reduce = strategy.group_all_reduce if plan.devices_per_group > 1 else None
    network.layers.connect(strategy.gather_stats, group_all_reduce, strategy.sync_buffers)
    return strategy


def build_watch(job: TrainingRun, network: Network, counters: Counters, logger: RunLogger) -> NanGuard:
    policy = job.recipe.engine.non_finite
    return NanGuard(
        job.device,
        logger,
        policy=policy.policy,
        budget=policy.max_skipped,
        loss_scale=lambda: network.precision.loss_scale if network.precision.expects_overflow else None,
        skipped=counters.skipped,
        gather=job.process_group.all_gather,
    )
