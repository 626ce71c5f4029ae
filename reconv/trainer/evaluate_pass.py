"""One exact pass over a validation set.

Owns the pass. Refuses to know metrics and devices. Invariant: every sample counts once, the last partial batch too,
and the model leaves in the mode it came in.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch

from reconv.batch import Batch
from reconv.tasks.task import Metrics, Task
from reconv.trainer.protocols import PrecisionProtocol, Prepare

Score = TypeVar("Score", bound=Metrics)


class EvaluationStopped(Exception):
    """The pass was given up between two batches because a stop was asked for."""


def evaluate(
    model: torch.nn.Module,
    task: Task,
    evaluator: Score,
    batches: Iterable[Batch],
    prepare: Prepare,
    precision: PrecisionProtocol,
    stop_requested: Callable[[], bool] = lambda: False,
    forward: Callable[..., Any] | None = None,
    boundary: Callable[[], None] = lambda: None,
) -> Score:
    """Score `model` on every batch and return the evaluator that holds the sums.

    `boundary` follows each batch, for devices that gather work.
    """
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():  # not every device knows torch's inference mode
            for batch in batches:
                if stop_requested():
                    raise EvaluationStopped
                prepared = prepare(batch, 0)
                with precision.autocast():
                    outputs = task.forward(forward or model, prepared)
                evaluator.update(outputs, prepared)
                boundary()
    finally:
        model.train(was_training)
    return evaluator
