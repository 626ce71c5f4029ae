"""The shared evaluation pass: mode of the model, gradients, and stopping between batches."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from reconv.core.batch import Batch
from reconv.tasks.evaluation import EvaluationStopped, InferenceStep, evaluate


class CountingMetrics:
    """Counts the batches and checks the state in which their outputs were computed."""

    num_samples = 0

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def update(self, outputs: Any, batch: Batch) -> None:
        assert not outputs.requires_grad and not self.model.training
        assert torch.equal(outputs, batch["images"] * 2)
        self.num_samples += len(batch)

    def compute(self) -> dict[str, float]:
        return {}

    def state(self) -> Any: ...
    def merge(self, states: Any) -> None: ...


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight


class NoPrecision:
    def autocast(self) -> Any:
        return nullcontext()


def batches(*sizes: int) -> list[Batch]:
    return [Batch({"images": torch.rand(n, 3)}, torch.arange(n), (n,)) for n in sizes]


@pytest.mark.parametrize("is_training", [True, False])
def test_every_batch_is_evaluated_without_gradients_and_the_mode_is_restored(is_training: bool) -> None:
    model = Scale().train(is_training)
    step = InferenceStep(model, lambda batch, step: batch, NoPrecision())  # type: ignore[arg-type]
    boundaries: list[None] = []
    metrics = evaluate(step, CountingMetrics(model), batches(4, 4, 1), step_boundary=lambda: boundaries.append(None))
    assert (metrics.num_samples, len(boundaries)) == (9, 3)
    assert model.training is is_training


def test_a_requested_stop_ends_the_pass_between_batches() -> None:
    model = Scale()
    step = InferenceStep(model, lambda batch, step: batch, NoPrecision())  # type: ignore[arg-type]
    metrics = CountingMetrics(model)
    with pytest.raises(EvaluationStopped):
        evaluate(step, metrics, batches(4, 4, 4), lambda: metrics.num_samples >= 8)
    assert metrics.num_samples == 8
    assert model.training
