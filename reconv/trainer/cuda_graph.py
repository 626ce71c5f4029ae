"""A whole step recorded once and launched again: what the host would do a thousand times costs one call.

Owns which steps share a recording, and the places where a recording finds its batch and leaves its results. Refuses to
know how a device records. Invariant: a launched recording computes what the plain step would, from the batch and the
step's number alone; what it returned earlier is not overwritten.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.trainer.protocols import Captures
from reconv.trainer.step import StepResult, StepScalars, TrainStep

WARM_STEPS = 3  # done plainly first: they make every tensor and choose every algorithm a recording must find
MOST_RECORDINGS = 16  # kinds of steps; each holds the memory of its activations

Kind = tuple[object, ...]


@dataclass(frozen=True, slots=True)
class _Recording:
    """A captured step: where its values go in, how it is launched, where its results lie."""

    scalars: tuple[Tensor, Tensor, Tensor]  # those of the moment
    batches: tuple[Batch, ...]
    result: StepResult
    launch: Callable[[], None]

    def __call__(self, moment: StepScalars, micro_batches: Sequence[Batch]) -> StepResult:
        for place, value in zip(self.scalars, (moment.step, moment.rate, moment.share), strict=True):
            place.fill_(value)
        for mine, theirs in zip(self.batches, micro_batches, strict=True):
            for name, place in mine.tensors.items():
                place.copy_(theirs[name], non_blocking=True)
            mine.positions.copy_(theirs.positions, non_blocking=True)
        self.launch()
        return _copied(self.result)


@dataclass(slots=True)
class CapturedStep:
    """A plain step that is recorded after its first few times, one recording for each kind of batch."""

    plain: TrainStep
    device: Captures
    _times: dict[Kind, int] = field(default_factory=dict)
    _recordings: dict[Kind, _Recording] = field(default_factory=dict)

    def __call__(self, step: int, micro_batches: Sequence[Batch]) -> StepResult:
        """Train on one global batch."""
        kind = tuple(_kind(batch) for batch in micro_batches)
        if kind not in self._recordings:
            times = self._times[kind] = self._times.get(kind, 0) + 1
            if times <= WARM_STEPS or len(self._recordings) == MOST_RECORDINGS:
                return self.device.run_on_stream(lambda: self.plain(step, micro_batches))
            self._recordings[kind] = self._record(step, micro_batches)
        return self._recordings[kind](self.plain.moment(step), micro_batches)

    def _record(self, step: int, micro_batches: Sequence[Batch]) -> _Recording:
        on = micro_batches[0].positions.device
        batches = tuple(batch.map(torch.clone) for batch in micro_batches)
        values = self.plain.moment(step)
        scalars = (
            torch.tensor(values.step, dtype=torch.int64, device=on),
            torch.tensor(values.rate, dtype=torch.float64, device=on),
            torch.tensor(values.share, dtype=torch.float64, device=on),
        )
        result, launch = self.device.capture(lambda: self.plain.run(StepScalars(*scalars), batches))
        return _Recording(scalars, batches, result, launch)


def _kind(batch: Batch) -> Kind:
    """What a recording fixes of a batch: groups, and each tensor's name, shape, type and layout."""
    described = ((name, t.shape, t.dtype, t.stride()) for name, t in sorted(batch.tensors.items()))
    return (batch.groups, *described)


def _copied(result: StepResult) -> StepResult:
    """The results in memory of their own: the next launch overwrites the recording's."""
    weight = result.weight.clone() if isinstance(result.weight, Tensor) else result.weight
    return replace(
        result,
        loss=result.loss.clone(),
        weight=weight,
        metrics={name: value.clone() for name, value in result.metrics.items()},
        grad_norm=result.grad_norm.clone(),
        ok=result.ok.clone(),
    )
