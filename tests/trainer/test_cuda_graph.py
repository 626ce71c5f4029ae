"""A captured step equals the eager step; only the batch and `StepScalars` change between replays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from reconv.core.batch import Batch
from reconv.device.graphs import MAX_GRAPHS
from reconv.recipe.parts.optimizer import OptimizerConfig
from reconv.trainer.step import WARMUP_STEPS, StepGraphs, StepResult

from .conftest import Parts, batch


class FakeCapture:
    """Replays work like a CUDA graph: it reads and writes the tensors of the capture."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_replayed = 0

    def run_on_stream(self, work: Callable[[], StepResult]) -> StepResult:
        return work()

    def capture(self, work: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        self.num_captured += 1
        tensors: list[Tensor] = [torch.full((), torch.nan, dtype=torch.float64) for _ in range(3)]
        result = StepResult(tensors[0], 8, {"top1": tensors[1]}, tensors[2], torch.tensor(False))

        def replay() -> None:
            self.num_replayed += 1
            new = work()
            for name in ("loss", "grad_norm", "ok"):
                getattr(result, name).copy_(getattr(new, name))
            result.metrics["top1"].copy_(new.metrics["top1"])

        return result, replay


OPTIMIZERS = {
    "sgd": OptimizerConfig(),
    "sgd-foreach": OptimizerConfig(implementation="foreach", norm_bias_lr_scale=2.0),
    "lars": OptimizerConfig(name="lars"),
    "rmsprop": OptimizerConfig(name="rmsprop"),
    "rmsprop-tf": OptimizerConfig(name="rmsprop-tf"),
    "adamw": OptimizerConfig(name="adamw"),
    "adamw-foreach": OptimizerConfig(name="adamw", implementation="foreach", layer_decay=0.7),
    "lamb": OptimizerConfig(name="lamb", weight_decay=0.02),
    "clip-norm": OptimizerConfig(clip_grad=0.5),
    "clip-value": OptimizerConfig(clip_grad=0.01, clip_mode="value"),
    "clip-agc": OptimizerConfig(clip_grad=0.01, clip_mode="agc"),
}
BITWISE = ("sgd", "adamw", "adamw-foreach", "lamb", "clip-norm", "clip-value", "clip-agc")


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_steps_equal_eager_steps(name: str, precision: str) -> None:
    """Learning rate, EMA weight and dropout depend on the step: a captured constant would show."""
    eager, captured = (Parts(precision, optimizer=OPTIMIZERS[name], dropout=0.5) for _ in range(2))
    capture = FakeCapture()
    graphed = replace(captured.step, graphs=StepGraphs(capture))
    for step in range(WARMUP_STEPS + 4):
        samples = batch(first=8 * step, dtype=eager.precision.input_dtype)
        expected, got = eager.step(step, [samples]), graphed(step, [samples])
        assert precision == "fp32" or torch.allclose(got.loss, expected.loss, rtol=1e-5)
    assert (capture.num_captured, capture.num_replayed) == (1, 4)
    ours, theirs = captured.tensors(), eager.tensors()
    if precision == "fp64":  # the fused kernel takes a learning rate on the device as float32
        assert [n for n in ours if not torch.allclose(ours[n], theirs[n], rtol=1e-5, atol=1e-6)] == []
    elif name in BITWISE:
        assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


def test_results_are_not_overwritten_by_the_next_replay() -> None:
    graphed = replace(Parts().step, graphs=StepGraphs(FakeCapture()))
    results = [graphed(step, [batch(first=8 * step)]) for step in range(WARMUP_STEPS + 3)]
    assert len({float(result.loss) for result in results}) == len(results)
    assert {f.name for f in fields(StepResult)} == {"loss", "weight", "metrics", "grad_norm", "ok"}


def test_each_batch_shape_has_its_own_graph() -> None:
    capture = FakeCapture()
    graphed = replace(Parts().step, graphs=StepGraphs(capture))
    whole = batch()
    halves = Batch(whole.tensors, whole.positions, (4, 4))
    for step in range(WARMUP_STEPS + 2):
        for kind in (whole, halves):
            graphed(2 * step, [kind])
    assert capture.num_captured == 2
    assert capture.num_replayed == 4


def test_steps_beyond_max_graphs_run_eagerly() -> None:
    capture = FakeCapture()
    graphed = replace(Parts().step, graphs=StepGraphs(capture))
    for rows in range(2, 2 + MAX_GRAPHS + 2):
        for step in range(WARMUP_STEPS + 1):
            assert bool(graphed(step, [batch(rows=rows)]).ok)
    assert capture.num_captured == MAX_GRAPHS
