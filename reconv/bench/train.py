"""`bench train`: the speed of a recipe's own training step.

Owns the result's fields. Refuses to know how a step works: it is built by the functions that `train` uses.
Invariant: every number comes from steps that really trained; what cannot be known is null, with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from reconv.bench.cost import layer_costs, shares
from reconv.bench.peers import Peer, compare
from reconv.bench.subject import Input, Subject, about, open_subject
from reconv.bench.timing import Marks, Windows, Wish, measure, process_age_s
from reconv.checkpoint.runfolder import RunFolder
from reconv.engine.loop import Counters
from reconv.errors import UsageError
from reconv.parallel.world import World
from reconv.place import read_place
from reconv.recipe.load import Override
from reconv.report.events import Event, Noted
from reconv.run import parts
from reconv.run.assemble import Job, build_learner, build_step
from reconv.run.folder import RestorePoint
from reconv.run.sources import Sources

Tell = Callable[[str], None]


def bench_train(
    recipe: str,
    *,
    input: Input = "device",
    data: str | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    wish: Wish | None = None,
    peers: Sequence[Peer] | None = None,
    tell: Tell = lambda text: None,
) -> dict[str, Any]:
    """Measure training steps of a recipe and, where `peers` is given, of others on the same data."""
    world = World.single()
    if read_place().size != 1:
        raise UsageError("a benchmark takes one process so far", then="start it without torchrun")
    wish = wish or Wish()
    subject = open_subject(recipe, input=input, data=data, overrides=overrides, device=device)
    tell(f"{subject.recipe.name}: {subject.recipe.model.name}, {subject.source.origin}, {subject.device.describe()}")
    windows, costs, notes = _measure_ours(subject, world, wish, tell)
    age_s = process_age_s()
    plan, opened = subject.plan, subject.device
    result: dict[str, Any] = {
        "bench": "train",
        "images_per_s": plan.global_batch / windows.median_s,
        "step_ms": windows.step_ms(),
        "window_images_per_s": [plan.global_batch / s for s in windows.step_s],
        "windows": len(windows.step_s),
        "steps_per_window": windows.steps,
        "batch": plan.global_batch,
        "micro_batch": plan.micro_batch,
        "image_size": plan.size_at(0),
        "precision": subject.recipe.precision.mode,
        "input": input,
        "data": subject.source.origin,
        "startup_s": None if age_s is None else age_s - (time.time() - windows.first_step_at_s),
        "peak_memory_bytes": opened.peak_memory_bytes(),
        **shares(
            costs,
            plan.micro_batch,
            windows.median_s * plan.micro_batch / plan.global_batch,
            opened.describe(),
            subject.recipe.precision.mode,
            training=True,
        ),
        "peers": {},
        "notes": notes,
        **about(subject.recipe, opened),
    }
    if peers is not None:
        result["peers"], said = compare(subject, peers, wish, result["images_per_s"], tell)
        notes.extend(said)
    return result


def _measure_ours(subject: Subject, world: World, wish: Wish, tell: Tell) -> tuple[Windows, Any, list[str]]:
    """The windows of our own step, the cost of the network's layers, and what a person should know."""
    recipe, plan, device = subject.recipe, subject.plan, subject.device
    notes: list[str] = []

    def hear(event: Event) -> None:
        if isinstance(event, Noted):
            notes.append(event.text)
            tell(event.text)

    # Nothing is restored and nothing written: the folder is a name, and the first batch counts as pictured.
    sources = Sources(subject.source, subject.source)
    job = Job(recipe, plan, sources, device, world, RunFolder(Path("bench")), RestorePoint(None, ()))
    learner = build_learner(job, hear)
    marks = Marks(device)
    step = build_step(job, learner, Counters(step=1), hear, marks.mark)
    batches = parts.train_loader(recipe, plan, subject.source, device.move)
    windows = measure(step, batches, device, wish, marks)
    if not marks.can_tell:
        notes.append(f"the parts of a step cannot be told apart on {device.kind}")
    if learner.teacher_fingerprint is not None:
        notes.append("the teacher's operations are timed, but not counted in the operations of an image")
    if len(plan.sizes) > 1:
        notes.append(f"measured at {plan.size_at(0)} px; the run goes on to {plan.sizes[-1][1]} px and gets slower")
    side = plan.size_at(0)
    costs = layer_costs(learner.network.model, (recipe.data.preprocess.channels, side, side), training=True)
    return windows, costs, notes
