"""A recorded step computes what the plain one does, from the batch and the step's number alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from reconv.batch import Batch
from reconv.recipe import schema
from reconv.trainer.cuda_graph import MAX_GRAPHS, WARMUP_STEPS, StepGraphs
from reconv.trainer.step import StepResult

from .conftest import Parts, batch


class Repeats:
    """Records as a CUDA graph does: what is launched again sees the places of the first time, and writes to them."""

    def __init__(self) -> None:
        self.num_captured = 0
        self.num_launched = 0

    def run_on_stream(self, work: Callable[[], StepResult]) -> StepResult:
        return work()

    def capture(self, work: Callable[[], StepResult]) -> tuple[StepResult, Callable[[], None]]:
        self.num_captured += 1
        places: list[Tensor] = [torch.full((), torch.nan, dtype=torch.float64) for _ in range(3)]
        result = StepResult(places[0], 8, {"top1": places[1]}, places[2], torch.tensor(False))

        def launch() -> None:
            self.num_launched += 1
            new = work()
            for name in ("loss", "grad_norm", "ok"):
                getattr(result, name).copy_(getattr(new, name))
            result.metrics["top1"].copy_(new.metrics["top1"])

        return result, launch


OPTIMIZERS = {
    "sgd": schema.OptimizerConfig(),
    "sgd-foreach": schema.OptimizerConfig(implementation="foreach", norm_bias_lr_scale=2.0),
    "lars": schema.OptimizerConfig(name="lars"),
    "rmsprop": schema.OptimizerConfig(name="rmsprop"),
    "rmsprop-tf": schema.OptimizerConfig(name="rmsprop-tf"),
}


@pytest.mark.parametrize("precision", ["fp32", "fp64"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replayed_steps_equal_eager_steps(name: str, precision: str) -> None:
    """Rates and the average's share fall with the step and dropout hashes it: a frozen number would show."""
    plain, recorded = (Parts(precision, optimizer=OPTIMIZERS[name], dropout=0.5) for _ in range(2))
    recorder = Repeats()
    graphed = replace(recorded.step, graphs=StepGraphs(recorder))
    for step in range(WARMUP_STEPS + 4):
        samples = batch(first=8 * step, dtype=plain.precision.input_dtype)
        expected, got = plain.step(step, [samples]), graphed(step, [samples])
        assert precision == "fp32" or torch.allclose(got.loss, expected.loss, rtol=1e-5)
    assert (recorder.num_captured, recorder.num_launched) == (1, 4)
    ours, theirs = recorded.tensors(), plain.tensors()
    if precision == "fp64":  # a rate on the device is a float32 to the fused kernel
        assert [n for n in ours if not torch.allclose(ours[n], theirs[n], rtol=1e-5, atol=1e-6)] == []
    elif name == "sgd":
        assert [n for n in ours if not torch.equal(ours[n], theirs[n])] == []


def test_results_are_not_overwritten_by_the_next_replay() -> None:
    graphed = replace(Parts().step, graphs=StepGraphs(Repeats()))
    results = [graphed(step, [batch(first=8 * step)]) for step in range(WARMUP_STEPS + 3)]
    assert len({float(result.loss) for result in results}) == len(results)
    assert {f.name for f in fields(StepResult)} == {"loss", "weight", "metrics", "grad_norm", "ok"}


def test_each_batch_shape_has_its_own_graph() -> None:
    recorder = Repeats()
    graphed = replace(Parts().step, graphs=StepGraphs(recorder))
    whole = batch()
    halves = Batch(whole.tensors, whole.positions, (4, 4))
    for step in range(WARMUP_STEPS + 2):
        for kind in (whole, halves):
            graphed(2 * step, [kind])
    assert recorder.num_captured == 2
    assert recorder.num_launched == 4


def test_steps_beyond_max_graphs_run_eagerly() -> None:
    recorder = Repeats()
    graphed = replace(Parts().step, graphs=StepGraphs(recorder))
    for rows in range(2, 2 + MAX_GRAPHS + 2):
        for step in range(WARMUP_STEPS + 1):
            assert bool(graphed(step, [batch(rows=rows)]).ok)
    assert recorder.num_captured == MAX_GRAPHS
