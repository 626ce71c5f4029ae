"""`bench train`: the speed of a recipe's training step, on one device or several.

Every number comes from real training steps; what cannot be measured is null, with a note.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from reconv.bench.baselines import TrainBaseline, compare
from reconv.bench.measure_step import MeasuredStep, measure_step
from reconv.bench.roofline import layer_costs, utilization
from reconv.bench.run import Input, LogFunction, bench_args, describe_setup, no_log, open_bench_run
from reconv.bench.scaling import measure_scaling
from reconv.bench.timing import TimingConfig
from reconv.build.checks import describe_ranks
from reconv.core.errors import UsageError
from reconv.core.machine import Machine, process_age_s
from reconv.distributed.environment import read_launch_env
from reconv.recipe.loader import Override, load
from reconv.trainer.options import RunOptions
from reconv.trainer.prepare import PreparedRun, run_on_devices


def bench_train(
    recipe: str,
    *,
    input: Input = "device",
    data: str | None = None,
    overrides: Sequence[Override] = (),
    device: str = "auto",
    devices: int | None = None,
    nic: str | None = None,
    config: TimingConfig | None = None,
    baselines: Sequence[TrainBaseline] | None = None,
    log: LogFunction = no_log,
) -> dict[str, Any]:
    """Time the training steps of a recipe and, if given, of baselines on the same data.

    With several `devices`, `log` must be importable; the result is that of rank 0.
    """
    _check_can_measure(recipe, overrides, devices or read_launch_env().world_size, baselines)
    args = bench_args(recipe, input=input, data=data, overrides=overrides, device=device, nic=nic)
    return run_on_devices(devices, _bench, args, input, config or TimingConfig(), baselines, log)


def _check_can_measure(
    recipe: str, overrides: Sequence[Override], num_devices: int, baselines: Sequence[TrainBaseline] | None
) -> None:
    """Refuse what several devices cannot measure, before any process is started."""
    pipeline = load(recipe, overrides).recipe.parallel.pipeline_stages
    if num_devices > 1 and baselines is not None:
        raise UsageError(
            f"--compare with {num_devices} devices: baselines are measured on one device",
            hint="leave --compare out; the result compares several devices with one",
        )
    if pipeline > 1:
        raise UsageError(
            f"parallel.pipeline_stages {pipeline}: bench train does not measure pipelines",
            why="it compares with one device, which does not hold the whole model",
            hint=f"measure the speed of a pipeline with: reconv train {recipe} --devices N --dry-run 20",
        )


def _bench(
    args: RunOptions, input: Input, config: TimingConfig, baselines: Sequence[TrainBaseline] | None, log: LogFunction
) -> dict[str, Any]:
    with open_bench_run(args) as run:
        return _measure(run, input, config, baselines, log if run.process_group.is_rank0 else no_log)


def _measure(
    run: PreparedRun, input: Input, config: TimingConfig, baselines: Sequence[TrainBaseline] | None, log: LogFunction
) -> dict[str, Any]:
    recipe, plan, device, world_size = run.recipe, run.plan, run.device, run.process_group.world_size
    log(f"{recipe.name}: {recipe.model.name}, {run.datasets.train.origin}, {device.describe()}")
    for line in describe_ranks(run.process_group, device.describe()):
        log(line)
    measured = measure_step(run, config, log)
    timings, size = measured.timings, plan.size_at(0)
    age_s, images_per_s = process_age_s(Machine()), plan.global_batch / timings.median_s
    result: dict[str, Any] = {
        "bench": "train",
        "images_per_s": images_per_s,
        "step_ms": timings.step_ms(),
        "window_images_per_s": [plan.global_batch / s for s in timings.step_s],
        "windows": len(timings.step_s),
        "steps_per_window": timings.steps,
        "batch": plan.global_batch,
        "batch_per_device": plan.batch_per_device,
        "micro_batch": plan.micro_batch,
        "image_size": size,
        "precision": recipe.precision.mode,
        "input": input,
        "data": run.datasets.train.origin,
        "startup_s": None if age_s is None else age_s - (time.time() - timings.first_step_at_s),
        "peak_memory_bytes": max(run.process_group.all_gather(device.peak_memory_bytes())),
        **utilization(
            layer_costs(measured.model, (recipe.data.preprocess.channels, size, size), training=True),
            plan.micro_batch,
            timings.median_s * plan.micro_batch / plan.batch_per_device,
            device.describe(),
            recipe.precision.mode,
            training=True,
        ),
        "devices": world_size,
        "images_per_s_per_device": images_per_s / world_size,
        "scaling": None,
        "baselines": {},
        "notes": [*measured.notes, *_notes(run, measured)],
        **describe_setup(recipe, device),
    }
    if world_size > 1:
        result["scaling"], notes = measure_scaling(run, measured, config, log)
        result["notes"] += notes
    if baselines is not None:
        result["baselines"], notes = compare(run, baselines, config, images_per_s, log)
        result["notes"] += notes
    return result


def _notes(run: PreparedRun, measured: MeasuredStep) -> list[str]:
    """Notes on what the numbers do not include."""
    plan, notes = run.plan, []
    if not measured.timings.parts_s:
        notes.append(f"the parts of a step cannot be timed on {run.device.kind}")
    if measured.has_teacher:
        notes.append("the teacher is part of the time, but not of the FLOPs")
    if len(plan.sizes) > 1:
        notes.append(f"measured at {plan.size_at(0)} px; the run goes up to {plan.sizes[-1][1]} px and gets slower")
    return notes
