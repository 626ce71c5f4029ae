"""A model of one data-parallel training step on n devices: where its time goes.

    step = compute + shared host + stragglers + exposed communication + exposed input

Compute is the step of one device alone, at its own batch size. Shared host is what a step in half precision gets slower
when all devices of a machine work at once. Stragglers: the slowest of n devices with independent, normally distributed
step times is sqrt(2 ln n) deviations late. Communication is a hierarchical ring all-reduce of the gradients (within the
machine, then between machines) in DDP's buckets, hidden behind the backward pass except for the last bucket. Input is
what decoding and storage are slower than the rest.

`ScalingParameters` has what was fitted to published results (`python -m benchmarks.scaling.check_plan` repeats it).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from reconv.planner.device_kinds import DeviceKind, Link

BUCKET_BYTES = 25 * 2**20  # torch's default bucket_cap_mb
LINK_EFFICIENCY = 0.8  # of a link's bandwidth that an all-reduce of large buffers reaches
BACKWARD_FRACTION = 2 / 3  # of the compute, in which gradients can be reduced
PARTS = ("compute", "shared host", "stragglers", "communication", "input")


@dataclass(frozen=True, slots=True)
class ScalingParameters:
    """Parameters fitted to published results of ResNet-50 (docs/results/scaling-model.md)."""

    straggler: float = 0.0150  # relative deviation of the step time of one device
    shared_host: float = 0.0777  # relative slowdown of half-precision steps with 8 devices in a machine
    run_overhead_s: float = 22.1  # time outside of training steps in one of Graphcore's MLPerf runs


FITTED = ScalingParameters()


@dataclass(frozen=True, slots=True)
class Workload:
    """Computation and traffic of one device in a step."""

    compute_s: float  # of one device alone
    batch_per_device: int
    gradient_bytes: float
    is_half_precision: bool
    norm_syncs: int = 0  # all-reduces of batch norm statistics, where a group of samples spans devices
    norm_sync_devices: int = 1


@dataclass(frozen=True, slots=True)
class InputLimits:
    """Rates that decoding and storage can deliver; None: enough."""

    images_per_s_per_node: float | None = None
    storage_images_per_s: float | None = None  # of the whole cluster

    def images_per_s(self, num_nodes: int) -> float:
        decoded = math.inf if self.images_per_s_per_node is None else self.images_per_s_per_node * num_nodes
        return min(decoded, math.inf if self.storage_images_per_s is None else self.storage_images_per_s)


@dataclass(frozen=True, slots=True)
class StepBreakdown:
    """The time of one step by part, in seconds."""

    compute_s: float
    shared_host_s: float
    straggler_s: float
    communication_s: float  # that is not hidden behind the backward pass
    input_s: float  # likewise, behind the rest of the step
    total_communication_s: float

    @property
    def parts_s(self) -> dict[str, float]:
        values = (self.compute_s, self.shared_host_s, self.straggler_s, self.communication_s, self.input_s)
        return dict(zip(PARTS, values, strict=True))

    @property
    def step_s(self) -> float:
        return sum(self.parts_s.values())


def predict_step(
    work: Workload,
    num_devices: int,
    kind: DeviceKind,
    parameters: ScalingParameters = FITTED,
    limits: InputLimits | None = None,
) -> StepBreakdown:
    """The time of one step on this number of devices."""
    local = min(num_devices, kind.devices_per_node)
    shared = parameters.shared_host * math.log2(local) / 3 if work.is_half_precision else 0.0
    late = parameters.straggler * math.sqrt(2 * math.log(num_devices)) if num_devices > 1 else 0.0
    compute_s = work.compute_s
    total_s = all_reduce_s(work.gradient_bytes, num_devices, kind)
    exposed_s = _exposed_s(total_s, work, kind) + _norm_sync_s(work, kind)
    busy_s = compute_s * (1 + shared + late) + exposed_s
    num_nodes = math.ceil(num_devices / kind.devices_per_node)
    rate = math.inf if limits is None else limits.images_per_s(num_nodes)
    input_s = max(0.0, work.batch_per_device * num_devices / rate - busy_s)
    return StepBreakdown(compute_s, compute_s * shared, compute_s * late, exposed_s, input_s, total_s)


def all_reduce_s(num_bytes: float, num_devices: int, kind: DeviceKind) -> float:
    """The time of all buckets of an all-reduce: within the machines by rings, between them by rings and a tree."""
    local = min(num_devices, kind.devices_per_node)
    num_nodes = math.ceil(num_devices / kind.devices_per_node)
    num_buckets = _num_buckets(num_bytes)
    seconds = _ring_s(num_bytes, local, kind.link) + num_buckets * 2 * (local - 1) * kind.link.latency_s
    if num_nodes > 1:
        seconds += _ring_s(num_bytes / local, num_nodes, kind.network)
        seconds += num_buckets * 2 * math.ceil(math.log2(num_nodes)) * kind.network.latency_s
    return seconds


def calibrate(
    work: Workload, measured_s: float, num_devices: int, kind: DeviceKind, parameters: ScalingParameters = FITTED
) -> Workload:
    """The workload whose predicted step on `num_devices` takes the measured time; its compute time is replaced."""
    low, high = 0.0, measured_s
    for _ in range(40):  # halving: the step grows with the compute
        compute_s = (low + high) / 2
        step_s = predict_step(replace(work, compute_s=compute_s), num_devices, kind, parameters).step_s
        low, high = (compute_s, high) if step_s < measured_s else (low, compute_s)
    return replace(work, compute_s=high)


def _num_buckets(num_bytes: float) -> int:
    return max(1, math.ceil(num_bytes / BUCKET_BYTES))


def _ring_s(num_bytes: float, count: int, link: Link) -> float:
    return 2 * (count - 1) / count * num_bytes / (link.bytes_per_s * LINK_EFFICIENCY)


def _exposed_s(total_s: float, work: Workload, kind: DeviceKind) -> float:
    """Seconds that the backward pass does not hide: the last bucket, or what takes longer than it."""
    if not kind.overlaps:
        return total_s
    last_s = total_s / _num_buckets(work.gradient_bytes)
    return max(last_s, total_s - BACKWARD_FRACTION * work.compute_s)


def _norm_sync_s(work: Workload, kind: DeviceKind) -> float:
    """Batch norm statistics are small: their time is latency, and nothing hides it."""
    if work.norm_sync_devices < 2:
        return 0.0
    spans_nodes = work.norm_sync_devices > kind.devices_per_node
    latency_s = kind.network.latency_s if spans_nodes else kind.link.latency_s
    return work.norm_syncs * 2 * math.ceil(math.log2(work.norm_sync_devices)) * latency_s
