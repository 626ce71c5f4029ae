"""A step that fits: the largest micro-batch is looked for, and one that does not fit is halved and the step done again.

Owns the search and the halving. Refuses to know devices and batches' meaning. Invariant: the global batch and its
groups stay, a micro-batch is a whole number of groups, and a step that ran out of memory has changed nothing before it
is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from reconv.batch import Batch
from reconv.trainer.protocols import Layers, OptimizerProtocol
from reconv.trainer.step import UPDATING, StepResult


class _Step(Protocol):
    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult: ...


@dataclass(slots=True)
class MicroBatchSize:
    """How many groups fit into one forward pass, as far as is known; a checkpoint tells the next start."""

    most_groups: int

    def halve(self, tried: int) -> None:
        """Take half of the groups that were tried, or what is nearest below it and divides them.

        Parts of parts are then cut where the whole would be, so that a run that goes on adds in the same order.
        """
        self.most_groups = next(size for size in range(tried // 2, 0, -1) if tried % size == 0)


def largest_that_fits(choices: Sequence[int], start: int, fits: Callable[[int], bool]) -> int:
    """The largest of the rising choices that fits, looked for from one of them; where none does, the smallest."""
    at = choices.index(start)
    if not fits(start):
        return next((size for size in reversed(choices[:at]) if fits(size)), choices[0])
    found = start
    for size in choices[at + 1 :]:
        if not fits(size):
            break
        found = size
    return found


@dataclass(frozen=True, slots=True)
class OomRetry:
    """A step whose micro-batches may be halved."""

    step: _Step
    fitting: MicroBatchSize
    layers: Layers
    optimizer: OptimizerProtocol
    is_out_of_memory: Callable[[BaseException], bool]
    release: Callable[[], None]  # gives back what the device holds in reserve
    tell: Callable[[int, str], None]

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch."""
        while True:
            cut = self._cut(micro_batches)
            try:
                return self.step(step, cut)
            except Exception as error:
                most = max(len(part.groups) for part in cut)
                is_whole = UPDATING not in getattr(error, "__notes__", ())
                if not (self.is_out_of_memory(error) and is_whole and most > 1):
                    raise
            # Out of the handler: the error's traceback holds the activations that did not fit.
            before = max(len(part) for part in cut)
            self.fitting.halve(most)
            self.layers.discard()
            self.optimizer.zero_grad()
            self.release()
            after = max(len(part) for part in self._cut(micro_batches))
            self.tell(step, f"out of memory: micro-batches of {before} are halved to {after}; the step is done again")

    def _cut(self, micro_batches: Sequence[Batch]) -> list[Batch]:
        return [part for batch in micro_batches for part in batch.split(self.fitting.most_groups)]
