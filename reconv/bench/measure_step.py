"""Our own training step under the clock.

Owns how a subject becomes a step that is measured. Refuses to know results and peers. Invariant: nothing is restored
and nothing written; several processes measure the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from reconv.bench.bench_target import BenchTarget
from reconv.bench.timing import Marks, Windows, Wish, measure
from reconv.checkpoint.run_dir import RunDir
from reconv.data.stage_timing import StageTimes
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.strategy import ParallelStrategy
from reconv.logging.events import Event, LogMessage
from reconv.logging.run_logger import RunLogger
from reconv.recipe.plan import Plan
from reconv.trainer.build import loaders as parts
from reconv.trainer.build.data_context import open_data_context
from reconv.trainer.build.datasets import Datasets
from reconv.trainer.build.train_state import TrainingRun, build_learner, build_step, fit_step, parallelize
from reconv.trainer.oom import MicroBatchSize
from reconv.trainer.resume import RestorePoint
from reconv.trainer.trainer import Counters


@dataclass(frozen=True, slots=True)
class Own:
    """What came of it, and the network and its process_group for further questions."""

    windows: Windows
    model: nn.Module
    strategy: ParallelStrategy
    has_teacher: bool
    notes: list[str]


def job_of(subject: BenchTarget, plan: Plan, process_group: ProcessGroup) -> TrainingRun:
    """The subject as a job; its folder is a name."""
    sources = Datasets(subject.source, subject.source)
    return TrainingRun(
        subject.recipe, plan, sources, subject.device, process_group, RunDir(Path("bench")), RestorePoint(None, ())
    )


def measure_own(
    subject: BenchTarget,
    plan: Plan,
    process_group: ProcessGroup,
    wish: Wish,
    tell: Callable[[str], None],
    beside: ProcessGroup | None = None,
) -> Own:
    """Time steps of a plan with a process group; the ranks of `beside` (default: the same) measure at the same time."""
    recipe, device = subject.recipe, subject.device
    notes: list[str] = []

    def collect_notes(event: Event) -> None:
        if isinstance(event, LogMessage):
            notes.append(event.text)
            tell(event.text)

    logger = RunLogger(collect_notes)
    job = job_of(subject, plan, process_group)
    learner = build_learner(job, logger)
    marks, strategy = Marks(device), parallelize(job, learner.network)
    # The first batch counts as pictured.
    plain = build_step(job, learner, Counters(step=1), logger, marks.mark, strategy)
    step = fit_step(job, learner, plain, MicroBatchSize(plan.micro_groups), logger)
    with open_data_context(recipe, plan, device, StageTimes()) as context:
        batches = parts.train_loader(recipe, plan, subject.source, context, rank=process_group.rank)
        windows = measure(step, batches, device, wish, marks, (beside or process_group).broadcast)
    return Own(windows, learner.network.model, strategy, learner.teacher_fingerprint is not None, notes)
