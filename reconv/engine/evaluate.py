"""One exact pass over a validation set.

Owns the pass. Refuses to know metrics and devices. Invariant: every sample counts once, the last partial batch too,
and the model leaves in the mode it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from reconv.batch import Batch
from reconv.engine.protocols import Evaluator, Precision, Prepare, Task


class EvaluationStopped(Exception):  # noqa: N818 - not an error: somebody asked the run to stop
    """The pass was given up between two batches because a stop was asked for."""


def evaluate(
    model: torch.nn.Module,
    task: Task,
    batches: Iterable[Batch],
    prepare: Prepare,
    precision: Precision,
    stop_requested: Callable[[], bool] = lambda: False,
    forward: Callable[..., Any] | None = None,
) -> Evaluator:
    """Score `model` on every batch and return the evaluator that holds the sums."""
    evaluator = task.evaluator()
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            for batch in batches:
                if stop_requested():
                    raise EvaluationStopped
                prepared = prepare(batch, 0)
                with precision.autocast():
                    outputs = task.forward(forward or model, prepared)
                evaluator.update(outputs, prepared)
    finally:
        model.train(was_training)
    return evaluator
