"""What several devices give and what they cost: weak scaling, and the share of the reduction in a step.

Owns the comparisons. Refuses to know how gradients travel. Invariant: everything is measured in one command with the
same samples on a device, the same threads and the same number of windows; all processes ask in the same order.

Three speeds are compared: together (one step of all devices), apart (all devices at once, each a step of its own that
tells the others nothing) and alone (rank 0, while the others wait).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import repeat
from typing import Any

from reconv.batch import Batch
from reconv.bench.bench_target import BenchTarget
from reconv.bench.measure_step import Own, measure_own
from reconv.bench.timing import Marks, Windows, Wish, measure
from reconv.distributed.process_group import ProcessGroup
from reconv.environment_checks import Machine, usable_cores
from reconv.recipe.plan import Plan


def measure_scaling(
    subject: BenchTarget, together: Own, process_group: ProcessGroup, wish: Wish, tell: Callable[[str], None]
) -> tuple[dict[str, Any], list[str]]:
    """The numbers of a step of several devices beside those of one, and what a person should know of them."""
    tell("measuring the reduction alone")
    traffic = together.strategy.gradient_traffic()
    reduced = _repeated(traffic.repeat, subject, process_group, wish)
    plan = subject.plan.one_device()
    tell("measuring all devices without the reduction")
    apart_s = max(process_group.all_gather(_single(subject, plan, wish, process_group)))
    tell("measuring one device alone")
    alone_s = process_group.on_rank0(lambda: _single(subject, plan, wish, ProcessGroup.single()))
    step_s = together.windows.median_s
    numbers = {
        "weak_scaling": alone_s / step_s,
        "alone_images_per_s": plan.global_batch / alone_s,
        "alone_step_ms": 1000 * alone_s,
        "apart_step_ms": 1000 * apart_s,
        "reduce": subject.recipe.parallel.reduce,
        "compress": subject.recipe.parallel.gradient_compression,
        "gradient_bytes": traffic.num_bytes,
        "buckets": traffic.num_buckets,
        "reduce_ms": 1000 * reduced.median_s,
        "reduce_share": reduced.median_s / step_s,
        "exposed_ms": 1000 * (step_s - apart_s),
        "exposed_share": (step_s - apart_s) / step_s,
    }
    return numbers, _notes(subject, process_group)


def _single(subject: BenchTarget, plan: Plan, wish: Wish, beside: ProcessGroup) -> float:
    """The time of a step of one device that tells nobody anything, while those beside it measure theirs."""
    return measure_own(subject, plan, ProcessGroup.single(), wish, lambda text: None, beside).windows.median_s


class _NoBatches:
    """A stream for what needs no samples."""

    def steps(self, start: int, stop: int) -> Iterator[Sequence[Batch]]:
        return repeat(())


def _repeated(work: Callable[[], None], subject: BenchTarget, process_group: ProcessGroup, wish: Wish) -> Windows:
    """Windows of something that is no step."""
    device = subject.device
    return measure(
        lambda number, batches: work(),
        _NoBatches(),
        device,
        wish,
        Marks(device),
        process_group.broadcast,
    )


def _notes(subject: BenchTarget, process_group: ProcessGroup) -> list[str]:
    """What makes these numbers less than they look."""
    plan, notes = subject.plan, []
    cores, threads = usable_cores(Machine()), process_group.launch_env.local_world_size * plan.threads
    if subject.device.kind == "cpu" and threads > cores:
        notes.append(f"{threads} threads share {cores} cores: this is no measure of scaling")
    if len({sum(groups) for groups in plan.device_groups}) > 1:
        notes.append("devices have different numbers of samples: one alone is measured with those of the first")
    if plan.devices_per_group > 1:
        notes.append("groups are spread over devices: what is not hidden holds the statistics of batch norm too")
    return notes
