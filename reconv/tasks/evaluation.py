"""The forward pass of inference, and one exact pass over a validation set; training, eval and predict share both.

Detectors are scored on the merged detections of all ranks, never on means of parts. States of metrics are kept over
whole batches, and merging them in any order gives the same bits (tests/laws/test_law_detection_ranks.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from reconv.core.batch import Batch, Preprocess
from reconv.precision import PrecisionPolicy

if TYPE_CHECKING:
    from reconv.data.pipeline.bad_samples import BadSamples
    from reconv.distributed.process_group import ProcessGroup
    from reconv.metrics.state import MetricsState
    from reconv.tasks.base import Metrics


class Updatable(Protocol):
    """Receiver of the outputs for one batch after the other."""

    def update(self, outputs: Any, batch: Batch) -> None: ...


# Runs a function from a batch to outputs as a CUDA graph.
RunCaptured = Callable[[Callable[[Batch], Any], Batch], Any]
AnyMetrics = TypeVar("AnyMetrics", bound=Updatable)


class EvaluationStopped(Exception):
    """The pass ended between two batches because a stop was requested."""


@dataclass(frozen=True, slots=True)
class InferenceStep:
    """From a batch on the device to the model's outputs: preprocessing, autocast, test-time augmentation."""

    model: nn.Module
    preprocess: Preprocess
    precision: PrecisionPolicy
    tta: str = "none"
    run_captured: RunCaptured | None = None  # None: the operations are launched one by one

    def __call__(self, batch: Batch) -> Any:
        """The model's outputs. The model must be in eval mode."""
        return self._run_eager(batch) if self.run_captured is None else self.run_captured(self._run_eager, batch)

    def _run_eager(self, batch: Batch) -> Any:
        forward = average_views(self.model, self.tta)
        with torch.no_grad():  # not every device supports torch.inference_mode
            prepared = self.preprocess(batch, 0)
            with self.precision.autocast():
                return forward(prepared["images"])


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put the model into eval mode, and back into the mode it was in."""
    was_training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(was_training)


def merge_ranks(
    metrics: Metrics, bad_samples: BadSamples, process_group: ProcessGroup, more: Sequence[MetricsState] = ()
) -> None:
    """Give every rank the metrics and the bad samples of all ranks, with `more` states of this one."""
    bad_samples.sync()
    if process_group.world_size > 1 or more:
        by_rank = process_group.all_gather([*more, metrics.state()])
        metrics.merge([state for states in by_rank for state in states])


def evaluate(
    step: InferenceStep,
    metrics: AnyMetrics,
    batches: Iterable[Batch],
    stop_requested: Callable[[], bool] = lambda: False,
    step_boundary: Callable[[], None] = lambda: None,
) -> AnyMetrics:
    """Update `metrics` with the outputs for every batch, the last partial one included, and return them.

    `step_boundary` is called after each batch, for devices that collect work into graphs.
    """
    with eval_mode(step.model), torch.no_grad():
        return update_metrics(metrics, batches, step, stop_requested, step_boundary)


def update_metrics(
    metrics: AnyMetrics,
    batches: Iterable[Batch],
    step: Callable[[Batch], Any],
    stop_requested: Callable[[], bool] = lambda: False,
    step_boundary: Callable[[], None] = lambda: None,
) -> AnyMetrics:
    """The same for any function from a batch to outputs."""
    for batch in batches:
        if stop_requested():
            raise EvaluationStopped
        metrics.update(step(batch), batch)
        step_boundary()
    return metrics


def average_views(model: Callable[..., Any], tta: str) -> Callable[..., Any]:
    """A function from images to the mean logits over the views of `evaluate.tta`; the model itself for `none`."""
    if tta == "none":
        return model

    def forward(images: Tensor) -> Tensor:
        total: Tensor | None = None
        for view, weight in views(images, tta):
            logits = model(view)
            weighted = (logits if logits.dtype == torch.float64 else logits.float()) * weight
            total = weighted if total is None else total + weighted
        assert total is not None
        return total

    return forward


def views(images: Tensor, tta: str) -> Iterator[tuple[Tensor, float]]:
    """Each view [n, channels, height, width] and its weight in the mean."""
    if tta == "flip":
        yield from _with_flip(images, 1.0)
    elif tta == "flip-translate":
        yield from _with_flip(images, 0.5)
        height, width = images.shape[-2:]
        padded = F.pad(images, (1, 1, 1, 1), mode="reflect")
        for offset in (0, 2):
            yield from _with_flip(padded[..., offset : offset + height, offset : offset + width], 0.25)
    else:
        raise ValueError(f"unknown test-time augmentation {tta!r}")


def _with_flip(images: Tensor, weight: float) -> Iterator[tuple[Tensor, float]]:
    yield images, weight / 2
    yield images.flip(-1), weight / 2
