"""A step that fits: micro-batches that do not fit into memory are halved, and the step is done again.

Owns the halving. Refuses to know devices and batches' meaning. Invariant: the global batch and its groups stay, a
micro-batch is a whole number of groups, and a step that ran out of memory has changed nothing before it is done again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from reconv.batch import Batch
from reconv.engine.protocols import Layers, Optimizer
from reconv.engine.step import UPDATING, StepResult


class _Step(Protocol):
    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult: ...


@dataclass(slots=True)
class FittingStep:
    """A step whose micro-batches may be halved."""

    step: _Step
    layers: Layers
    optimizer: Optimizer
    is_out_of_memory: Callable[[BaseException], bool]
    release: Callable[[], None]  # gives back what the device holds in reserve
    tell: Callable[[int, str], None]
    _most_groups: int | None = field(default=None)  # in one forward pass; None: as they come

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch."""
        while True:
            cut = [part for batch in micro_batches for part in batch.parts(self._most_groups or len(batch.groups))]
            try:
                return self.step(step, cut)
            except Exception as error:
                most = max(len(part.groups) for part in cut)
                is_whole = UPDATING not in getattr(error, "__notes__", ())
                if not (self.is_out_of_memory(error) and is_whole and most > 1):
                    raise
            # Out of the handler: the error's traceback holds the activations that did not fit.
            before = max(len(part) for part in cut)
            self._most_groups = (most + 1) // 2
            self.layers.forget()
            self.optimizer.zero_grad()
            self.release()
            after = max(len(part) for batch in micro_batches for part in batch.parts(self._most_groups))
            self.tell(step, f"out of memory: micro-batches of {before} are halved to {after}; the step is done again")
