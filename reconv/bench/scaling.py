"""Weak scaling on several devices, and the cost of the gradient reduction.

Everything is measured in one command, with the same samples per device and the same threads: the step of all devices
together; the steps of all devices at once, each without communication; and the step of rank 0 while the others wait.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from reconv.bench.measure_step import MeasuredStep, measure_step
from reconv.bench.timing import StepTimer, TimingConfig, measure
from reconv.core.batch import Batch
from reconv.core.machine import Machine, usable_cores
from reconv.distributed.process_group import ProcessGroup
from reconv.trainer.prepare import PreparedRun


def measure_scaling(
    run: PreparedRun, measured: MeasuredStep, config: TimingConfig, log: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """Compare the measured step of all devices with that of one; returns the numbers and notes on them."""
    process_group = run.process_group
    log("measuring the gradient reduction alone")
    traffic = measured.strategy.gradient_traffic()
    reduce_s = _measure_call(traffic.repeat, run, config)
    single = run.on_one_device()

    def single_step_s(concurrent: ProcessGroup) -> float:
        return measure_step(single, config, lambda text: None, concurrent).timings.median_s

    log("measuring all devices without the gradient reduction")
    no_comm_step_s = max(process_group.all_gather(single_step_s(process_group)))
    log("measuring one device alone")
    single_device_step_s = process_group.on_rank0(lambda: single_step_s(ProcessGroup.single()))
    step_s = measured.timings.median_s
    exposed_comm_s = step_s - no_comm_step_s
    numbers = {
        "weak_scaling": single_device_step_s / step_s,
        "alone_images_per_s": single.plan.global_batch / single_device_step_s,
        "alone_step_ms": 1000 * single_device_step_s,
        "apart_step_ms": 1000 * no_comm_step_s,
        "reduce": run.recipe.parallel.reduce,
        "compress": run.recipe.parallel.gradient_compression,
        "gradient_bytes": traffic.num_bytes,
        "buckets": traffic.num_buckets,
        "reduce_ms": 1000 * reduce_s,
        "reduce_share": reduce_s / step_s,
        "exposed_ms": 1000 * exposed_comm_s,
        "exposed_share": exposed_comm_s / step_s,
    }
    return numbers, _notes(run)


class _EmptyBatches:
    """A loader for calls that need no samples."""

    def steps(self, start: int, stop: int) -> Iterator[Sequence[Batch]]:
        return repeat(())


def _measure_call(function: Callable[[], None], run: PreparedRun, config: TimingConfig) -> float:
    """The median time of a call, in seconds."""
    device = run.device
    timings = measure(
        lambda step, batches: function(),
        _EmptyBatches(),
        device,
        config,
        StepTimer(device),
        run.process_group.broadcast,
    )
    return timings.median_s


def _notes(run: PreparedRun) -> list[str]:
    """Caveats on these numbers."""
    plan, notes = run.plan, []
    cores, threads = usable_cores(Machine()), run.process_group.launch_env.local_world_size * plan.threads
    if run.device.kind == "cpu" and threads > cores:
        notes.append(f"{threads} threads share {cores} cores: this does not measure scaling")
    if len({sum(groups) for groups in plan.device_groups}) > 1:
        notes.append("devices have different numbers of samples: one device alone is measured with those of the first")
    if plan.devices_per_group > 1:
        notes.append("batch norm groups span several devices: the exposed time includes their statistics")
    return notes
