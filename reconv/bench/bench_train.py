"""`bench train`: the speed of a recipe's own training step, on one device or on several.

Owns the result's fields and who measures. Refuses to know how a step works: it is built by the functions that `train`
uses. Invariant: every number comes from steps that really trained; what cannot be known is null, with a reason.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from reconv.bench.baselines import Peer, compare
from reconv.bench.bench_scaling import measure_scaling
from reconv.bench.bench_target import BenchTarget, Input, about, open_subject
from reconv.bench.measure_step import Own, job_of, measure_own
from reconv.bench.roofline import layer_costs, shares
from reconv.bench.timing import Windows, Wish, process_age_s
from reconv.device import device_kind
from reconv.device.affinity import cpu_affinity
from reconv.distributed.environment import must_launch, read_launch_env
from reconv.distributed.failure import report_failures
from reconv.distributed.nic import choose_nic
from reconv.distributed.process_group import ProcessGroup, open_process_group
from reconv.errors import UsageError
from reconv.recipe.loader import Override, load
from reconv.trainer.micro_batch import settle_micro
from reconv.trainer.run_setup import refuse_devices, topology

Tell = Callable[[str], None]


def say_nothing(text: str) -> None:
    """For those who want the result alone."""


@dataclass(frozen=True, slots=True)
class _Ask:
    """What to measure, as a process that is started for it can be told."""

    recipe: str
    input: Input
    data: str | None
    overrides: tuple[Override, ...]
    device: str
    nic: str | None
    wish: Wish
    tell: Tell


def bench_train(
    recipe: str,
    *,
    input: Input = "device",
    data: str | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    devices: int | None = None,
    nic: str | None = None,
    wish: Wish | None = None,
    peers: Sequence[Peer] | None = None,
    tell: Tell = say_nothing,
) -> dict[str, Any]:
    """Measure training steps of a recipe and, where `peers` is given, of others on the same data.

    With `devices`, so many processes measure together, and `tell` is a function of a module; rank 0's result returns.
    """
    launch_env = read_launch_env()
    ask = _Ask(recipe, input, data, tuple(overrides), device, nic, wish or Wish(), tell)
    _refuse_with_several(ask, devices or launch_env.world_size, peers)
    if devices is not None and must_launch(devices, launch_env):
        from reconv.distributed.launcher import launch  # torch's launcher, which one process does not need

        refuse_devices(devices, device, load(ask.recipe, ask.overrides).recipe)
        return launch(devices, _bench, ask)
    return _bench(ask, peers)


def _refuse_with_several(ask: _Ask, num_devices: int, peers: Sequence[Peer] | None) -> None:
    """Refuse what several processes cannot measure, before any is started."""
    parallel = load(ask.recipe, ask.overrides).recipe.parallel
    if num_devices > 1 and peers is not None:
        raise UsageError(
            f"--compare with {num_devices} devices: peers are measured on one",
            then="leave --compare out; ours is compared with itself on one device",
        )
    if parallel.pipeline_stages > 1:
        raise UsageError(
            f"parallel.pipeline_stages {parallel.pipeline_stages}: a pipeline has no device to be compared with",
            why="one device of it does not have the whole network",
            then=f"reconv train {ask.recipe} --devices N --dry-run 20 tells the speed of a pipeline",
        )


def _bench(ask: _Ask, peers: Sequence[Peer] | None = None) -> dict[str, Any]:
    """Measure in this process, alone or with the others."""
    launch_env = read_launch_env()
    choose_nic(ask.nic)
    process_group = open_process_group(launch_env, device_kind(ask.device))

    def open_here() -> BenchTarget:
        return open_subject(
            ask.recipe,
            input=ask.input,
            data=ask.data,
            overrides=ask.overrides,
            device=ask.device,
            launch_env=launch_env,
        )

    with report_failures(process_group):
        if process_group.world_size > 1:
            process_group.on_rank0(lambda: bool(open_here()))  # what is refused is said once
        subject = open_here()
        subject = replace(subject, plan=settle_micro(job_of(subject, subject.plan, process_group)).plan)
        wish = subject.recipe.engine.cpu_affinity
        with cpu_affinity(
            wish,
            subject.device.pci_address,
            local_rank=launch_env.local_rank,
            local_world_size=launch_env.local_world_size,
        ):
            return _measure(subject, process_group, ask, peers)


def _measure(
    subject: BenchTarget, process_group: ProcessGroup, ask: _Ask, peers: Sequence[Peer] | None
) -> dict[str, Any]:
    """The whole result."""
    tell = ask.tell if process_group.is_rank0 else say_nothing
    tell(f"{subject.recipe.name}: {subject.recipe.model.name}, {subject.source.origin}, {subject.device.describe()}")
    for line in topology(process_group, subject.device.describe()):
        tell(line)
    own = measure_own(subject, subject.plan, process_group, ask.wish, tell)
    costs = layer_costs(own.model, _image(subject), training=True)
    age_s, images_per_s = process_age_s(), subject.plan.global_batch / own.windows.median_s
    result: dict[str, Any] = {
        "bench": "train",
        "images_per_s": images_per_s,
        **_speed(subject, own.windows),
        "startup_s": None if age_s is None else age_s - (time.time() - own.windows.first_step_at_s),
        "peak_memory_bytes": max(process_group.all_gather(subject.device.peak_memory_bytes())),
        **shares(
            costs,
            subject.plan.micro_batch,
            own.windows.median_s * subject.plan.micro_batch / subject.plan.batch_per_device,
            subject.device.describe(),
            subject.recipe.precision.mode,
            training=True,
        ),
        "devices": process_group.world_size,
        "images_per_s_per_device": images_per_s / process_group.world_size,
        "scaling": None,
        "peers": {},
        "notes": [*own.notes, *_notes(subject, own)],
        **about(subject.recipe, subject.device),
    }
    if process_group.world_size > 1:
        result["scaling"], said = measure_scaling(subject, own, process_group, ask.wish, tell)
        result["notes"] += said
    if peers is not None:
        result["peers"], said = compare(subject, peers, ask.wish, images_per_s, tell)
        result["notes"] += said
    return result


def _speed(subject: BenchTarget, windows: Windows) -> dict[str, Any]:
    """The windows, and what was measured in them."""
    plan = subject.plan
    return {
        "step_ms": windows.step_ms(),
        "window_images_per_s": [plan.global_batch / s for s in windows.step_s],
        "windows": len(windows.step_s),
        "steps_per_window": windows.steps,
        "batch": plan.global_batch,
        "batch_per_device": plan.batch_per_device,
        "micro_batch": plan.micro_batch,
        "image_size": plan.size_at(0),
        "precision": subject.recipe.precision.mode,
        "input": subject.input,
        "data": subject.source.origin,
    }


def _image(subject: BenchTarget) -> tuple[int, int, int]:
    """The shape of the first training images."""
    side = subject.plan.size_at(0)
    return subject.recipe.data.preprocess.channels, side, side


def _notes(subject: BenchTarget, own: Own) -> list[str]:
    """What a person should know of the numbers."""
    plan, notes = subject.plan, []
    if not own.windows.parts_s:
        notes.append(f"the parts of a step cannot be told apart on {subject.device.kind}")
    if own.has_teacher:
        notes.append("the teacher's operations are timed, but not counted in the operations of an image")
    if len(plan.sizes) > 1:
        notes.append(f"measured at {plan.size_at(0)} px; the run goes on to {plan.sizes[-1][1]} px and gets slower")
    return notes
