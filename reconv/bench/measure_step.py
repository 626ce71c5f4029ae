"""Our own training step under the clock.

Owns how a subject becomes a step that is measured. Refuses to know results and peers. Invariant: nothing is restored
and nothing written; several processes measure the same number of steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from reconv.bench.bench_target import Subject
from reconv.bench.timing import Marks, Windows, Wish, measure
from reconv.checkpoint.run_dir import RunFolder
from reconv.data.pipeline.stage_timing import Stages
from reconv.trainer.oom import Fitting
from reconv.trainer.trainer import Counters
from reconv.distributed.process_group import Shared, World
from reconv.recipe.plan import Plan
from reconv.logging.events import Event, Noted
from reconv.trainer import builders as parts
from reconv.trainer.build import Job, build_learner, build_step, fit_step, share
from reconv.trainer.data_context import open_feed
from reconv.trainer.run_choice import RestorePoint
from reconv.trainer.datasets import Sources


@dataclass(frozen=True, slots=True)
class Own:
    """What came of it, and the network and its world for further questions."""

    windows: Windows
    model: nn.Module
    shared: Shared
    has_teacher: bool
    notes: list[str]


def job_of(subject: Subject, plan: Plan, world: World) -> Job:
    """The subject as a job; its folder is a name."""
    sources = Sources(subject.source, subject.source)
    return Job(subject.recipe, plan, sources, subject.device, world, RunFolder(Path("bench")), RestorePoint(None, ()))


def measure_own(
    subject: Subject, plan: Plan, world: World, wish: Wish, tell: Callable[[str], None], beside: World | None = None
) -> Own:
    """Time steps of the recipe by a plan, together with a world; those `beside` (else the same) measure at once."""
    recipe, device = subject.recipe, subject.device
    notes: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Noted):
            notes.append(event.text)
            tell(event.text)

    job = job_of(subject, plan, world)
    learner = build_learner(job, hear)
    marks, shared = Marks(device), share(job, learner.network)
    # The first batch counts as pictured.
    plain = build_step(job, learner, Counters(step=1), hear, marks.mark, shared)
    step = fit_step(job, learner, plain, Fitting(plan.micro_groups), hear)
    with open_feed(recipe, plan, device, Stages()) as feed:
        batches = parts.train_loader(recipe, plan, subject.source, device.move, rank=world.rank, feed=feed)
        windows = measure(step, batches, device, wish, marks, (beside or world).told_by_first)
    return Own(windows, learner.network.model, shared, learner.teacher_fingerprint is not None, notes)
