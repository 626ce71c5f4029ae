"""Strategies by which ranks share one training step; `ParallelStrategy` itself is the step of a single process.

DDP, ordered reduction and pipeline parallelism override it in `ddp`, `ordered_reduce` and `pipeline`. Every rank calls
the methods in the same order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor, nn

from reconv.core.bits import bits_sum

Number = TypeVar("Number", bound=Tensor | float)
GroupStats = Sequence[tuple[int, Tensor]]  # of each batch-norm group: number of samples, flat statistics


@dataclass(frozen=True, slots=True)
class PipelineConfig:
    """Settings of pipeline parallelism: how a model is split into stages, and their schedule."""

    split: Callable[[nn.Module], Sequence[Sequence[tuple[str, nn.Module]]]]  # the named modules of each stage
    schedule: str  # gpipe, 1f1b or sequential


@dataclass(frozen=True, slots=True)
class StrategyConfig:
    """Settings of the parallel strategy: how the ranks divide a step."""

    ordered: bool = False  # add gradients in group order: bitwise equal to a single process
    num_passes: tuple[int, ...] = (1,)  # forward passes of each rank
    ranks_per_group: int = 1  # ranks that hold parts of one batch-norm group
    bucket_bytes: int = 25 << 20
    compress: str = "off"
    pipeline: PipelineConfig | None = None


@dataclass(frozen=True, slots=True)
class GradientTraffic:
    """Traffic of one rank to reduce the gradients of one step."""

    num_bytes: int = 0
    num_buckets: int = 0
    repeat: Callable[[], None] = lambda: None  # reduce the same buffers again; called by all ranks


class ParallelStrategy:
    """Strategy by which ranks run a training step together. This class is the strategy of a single process."""

    rank = 0
    world_size = 1
    is_pipeline = False  # whether the model's stages are on several ranks
    _digests: list[Tensor] | None = None  # of this rank's gradients, while they are recorded

    def wrap(self, forward: Callable[..., object]) -> Callable[..., object]:
        """The forward function that a step must call."""
        return forward

    @property
    def repeats_bits(self) -> bool:
        """True if a step that is computed again gives the same bits."""
        return True

    @contextmanager
    def recording(self) -> Iterator[list[Tensor]]:
        """Collect digests of this rank's gradients inside, taken before they are added to those of others."""
        digests: list[Tensor] = []
        self._digests = digests
        try:
            yield digests
        finally:
            self._digests = None

    def _record(self, gradients: Sequence[Tensor]) -> None:
        if self._digests is not None:
            self._digests += [bits_sum(gradient) for gradient in gradients]

    def unwrap(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward function of one rank alone, of the one that `wrap` has returned."""
        return forward

    def parameters(self) -> list[nn.Parameter]:
        """The parameters whose gradients the ranks add."""
        return []

    def keeps_passes_apart(self, rank: int) -> bool:
        """True if a rank adds the gradients of its passes only to the sum that it receives from another one."""
        return False

    def no_sync(self, enabled: bool) -> AbstractContextManager[None]:
        """Wraps each forward and backward pass; enabled for all but the last of a step, as in DDP."""
        return nullcontext()

    def pipeline_step(
        self,
        images: Sequence[Tensor],
        enter: Callable[[int], None],
        loss: Callable[[Any, int], Tensor],
        autocast: Callable[[], AbstractContextManager[None]],
    ) -> None:
        """All forward and backward passes of a step through a pipeline.

        `enter(i)` is called before the forward pass of micro-batch i, `loss(outputs, i)` after it on the last stage.
        """
        raise NotImplementedError

    def reduce_gradients(self) -> None:
        """Sum the gradients over all ranks, in place."""

    def gradient_traffic(self) -> GradientTraffic:
        """Traffic of the last step to reduce its gradients, for benchmarks."""
        return GradientTraffic()

    def all_reduce(self, value: Number) -> Number:
        """The sum over all ranks."""
        return value

    def sum_metrics(self, passes: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """The sum of each metric over the passes of all ranks, in order."""
        return {name: ordered_sum([metrics[name] for metrics in passes]) for name in passes[0]}

    def gather_stats(self, groups: GroupStats) -> GroupStats:
        """The batch-norm groups of all ranks, in order, or fewer with the same weighted mean."""
        return groups

    def group_all_reduce(self, value: Tensor) -> Tensor:
        """The sum over the ranks that hold parts of one batch-norm group; differentiable."""
        return value

    def sync_buffers(self) -> None:
        """Give all ranks the same buffers, after running statistics were updated."""


def ordered_sum(values: Sequence[Tensor]) -> Tensor:
    """The sum, added from left to right."""
    total = values[0]
    for value in values[1:]:
        total = total + value
    return total
