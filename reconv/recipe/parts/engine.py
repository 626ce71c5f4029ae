"""The recipe section `engine`: how steps are executed on a device."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from reconv.recipe.units import Positive, PositiveFraction, Section, Switch, Threads, parse_switch


class NonFiniteConfig(Section):
    """Reaction to a loss or gradient that is NaN or infinite; such an update is never applied."""

    policy: Literal["stop", "skip"] = "stop"
    """Stop the run, or skip the step."""
    max_skipped: Positive = 10
    """Most skipped steps in a run before it stops."""


class DivergenceConfig(Section):
    """Reaction to training that diverges with finite numbers: a loss above its start, or a metric that collapses."""

    policy: Literal["warn", "stop", "rewind", "ignore"] = "warn"
    """Warn once with the command that continues the best checkpoint with a smaller rate; stop with exit code 5; rewind:
    take back weights, optimizer state and average of the best checkpoint and continue with a smaller rate, also after
    steps that are not finite; or ignore."""
    lr_factor: PositiveFraction = 0.1
    """What a rewind multiplies the learning rate by."""
    max_rewinds: Positive = 3
    """Most rewinds of a run before it stops."""


class EngineConfig(Section):
    """Execution of steps: compilation, kernels, CPU threads."""

    compile: Switch = "auto"
    """Use torch.compile; `auto` does on CUDA where fused_kernels are not used, and on Gaudi."""
    fused_kernels: Switch = "auto"
    """CUDA: use Reconv's fused kernels for batch norm and the layers around it; `auto` does where the network has
    such layers, unless `compile` is on or off; if it is off, FastNet's max-pools have kernels with the same bits."""
    cuda_graphs: Switch = "auto"
    """CUDA: capture the whole step, and the forward pass of evaluations, as a CUDA graph; `auto` does unless `compile`
    is off, there are several processes or the step runs your own code."""
    deterministic: bool = False
    """Use deterministic algorithms only, so that a run on the same hardware gives the same bits."""
    cudnn_benchmark: Switch = "auto"
    """CUDA: time convolution algorithms for each input size of training and keep the fastest; `auto` does in runs of
    4,000 steps or more, which make up for the seconds that it takes, unless `deterministic`: the next run may choose
    another algorithm."""
    cudnn_benchmark_limit: Literal["all"] | Positive = 10
    """CUDA: number of algorithms to time per convolution; timing is most of a large network's first step."""
    num_threads: Threads | Literal["auto"] = "auto"
    """Torch threads per process; `auto` uses all cores this process may use."""
    cpu_affinity: Annotated[str, Field(pattern=r"^(any|near|share|\d+(-\d+)?(,\d+(-\d+)?)*)$")] = "any"
    """CPU cores of a process and its workers: `any`, those `near` its GPU, an equal `share` of the machine's for each
    process, or a list as in 0-7,16-23."""
    channels_last: Switch = "auto"
    """Use the channels-last memory format."""
    non_finite: NonFiniteConfig = NonFiniteConfig()
    divergence: DivergenceConfig = DivergenceConfig()
    verify: Annotated[Literal["off", "sample", "full"], BeforeValidator(parse_switch)] = "off"
    """Find bits that defective hardware gets wrong, and go back to the last state that was proved right: `sample`
    compares digests of weights, statistics, optimizer state and EMA in every step, those of cached images and of
    checkpoints, and computes one of 100 steps again, on a CPU partly; `full` computes every step again, from batches
    loaded again. On a GPU both take deterministic algorithms."""
