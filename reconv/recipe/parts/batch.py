"""The recipe sections `batch`, `parallel` and `memory`: how a global batch is split over devices and fits into them."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from reconv.recipe.units import BatchSize, Listed, PositiveFloat, Section, parse_switch


class BatchConfig(Section):
    """The global batch, its groups and its micro-batches."""

    size: BatchSize = 256
    """Global batch size: samples of one optimizer step over all devices."""
    group: BatchSize | Literal["all", "micro"] = "all"
    """Ghost batch norm size: samples over which batch norm statistics, MixUp and CutMix work. `all` is the global
    batch; `micro` is the micro-batch, so that results depend on the hardware."""
    micro: BatchSize | Literal["auto"] = "auto"
    """Most samples per forward pass of a device; smaller values accumulate gradients over several passes."""


class ParallelConfig(Section):
    """Data and pipeline parallelism."""

    reduce: Literal["fast", "ordered"] = "fast"
    """How gradients are summed over processes: `fast` uses bucketed all-reduce during the backward pass; `ordered`
    sums in the order of the groups, so that the bits do not depend on the number of processes."""
    bucket_cap_mb: PositiveFloat = 25
    """Bucket size of the fast all-reduce in MiB."""
    gradient_compression: Annotated[Literal["off", "bf16"], BeforeValidator(parse_switch)] = "off"
    """Compress gradients for the fast all-reduce."""
    pipeline_stages: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of devices that one copy of the network is split over (pipeline parallelism)."""
    pipeline_splits: Annotated[tuple[str, ...], Listed] = ()
    """Names of the network's stages at which the next device begins."""
    pipeline_schedule: Literal["gpipe", "1f1b", "sequential"] = "gpipe"
    """Order of forward and backward passes: GPipe, 1F1B, or one micro-batch at a time."""
    heartbeat_timeout_s: Annotated[float, Field(ge=2, le=600)] = 30
    """Seconds without a heartbeat until a process counts as lost."""


def _stage_names(value: object) -> object:
    """A bare name is a list of one; `off` and `on` are words."""
    value = parse_switch(value)
    if isinstance(value, str) and value not in ("off", "auto", "all"):
        return [name.strip() for name in value.split(",")]
    return value


class MemoryConfig(Section):
    """Ways to save device memory. None of these fields changes what a run computes."""

    activation_checkpointing: Annotated[
        Annotated[tuple[str, ...], Listed] | Literal["off", "auto", "all"], BeforeValidator(_stage_names)
    ] = "off"
    """Stages whose activations are recomputed in the backward pass: names as in [stem, layer1], `all`, or `auto` for
    those with the largest activations, until half of the activation memory is saved."""
    checkpoint_segments: Annotated[tuple[str, ...], Listed] = ()
    """Stages at which a new checkpointed segment begins; all segments but the last are recomputed."""
    shard_optimizer: bool = False
    """Each process keeps the optimizer state of its share of the parameters (ZeRO stage 1)."""
    offload_optimizer: bool = False
    """Keep the optimizer state in host memory and copy it for each update."""
