"""Timing the training step of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from torch import nn

from reconv.bench.timing import StepTimer, TimingConfig, Timings, measure
from reconv.build.data import build_train_loader, open_data_context
from reconv.data.stage_timing import StageTimes
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.strategy import ParallelStrategy
from reconv.logging.events import Event, LogMessage
from reconv.logging.run_logger import RunLogger
from reconv.trainer.prepare import PreparedRun
from reconv.trainer.step import MicroBatchSize, build_train_step
from reconv.trainer.train_state import build_train_state, parallelize


@dataclass(frozen=True, slots=True)
class MeasuredStep:
    """The timings of a training step, with its model and parallel strategy."""

    timings: Timings
    model: nn.Module
    strategy: ParallelStrategy
    has_teacher: bool
    notes: list[str]


def measure_step(
    run: PreparedRun, config: TimingConfig, log: Callable[[str], None], process_group: ProcessGroup | None = None
) -> MeasuredStep:
    """Time training steps of a run; nothing is restored or written.

    The ranks of `process_group`, by default that of the run, measure at the same time.
    """
    notes: list[str] = []

    def collect_notes(event: Event) -> None:
        if isinstance(event, LogMessage):
            notes.append(event.text)
            log(event.text)

    logger = RunLogger(collect_notes)
    train_state = build_train_state(run, logger)
    timer, strategy = StepTimer(run.device), parallelize(run, train_state.network, train_state.loss)
    micro_batch_size = MicroBatchSize(run.plan.micro_groups)
    step = build_train_step(
        run, train_state, logger, annotate=timer.annotate, micro_batch_size=micro_batch_size, strategy=strategy
    )
    with open_data_context(run.recipe, run.plan, run.device, StageTimes()) as context:
        loader = build_train_loader(run.recipe, run.plan, run.datasets.train, context, rank=run.process_group.rank)
        timings = measure(step, loader, run.device, config, timer, (process_group or run.process_group).broadcast)
    return MeasuredStep(
        timings, train_state.network.model, strategy, train_state.teacher_fingerprint is not None, notes
    )
