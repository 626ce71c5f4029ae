"""A captured evaluation equals an eager one while the weights change; what cannot be captured runs eagerly."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from reconv.build.data import build_eval_loader
from reconv.checkpoint.safetensors_bytes import encode
from reconv.core.batch import Batch
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.device import Cpu
from reconv.device.graphs import MAX_GRAPHS
from reconv.logging.events import EvalFinished
from reconv.logging.run_logger import RunLogger
from reconv.metrics.topk import ClassificationMetrics
from reconv.tasks.evaluation import InferenceStep, evaluate
from reconv.trainer.evaluator import EvalGraphs, Evaluator
from reconv.trainer.run import TrainingRun
from reconv.trainer.train_state import TrainState, build_train_state

from .conftest import Parts, batch

T = TypeVar("T")
HOST_READ = "operation not permitted when stream is capturing"


class RecordOperations(TorchDispatchMode):
    """Records every operation with its tensors; reading a value on the host is an error, as in a CUDA capture."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Callable[[], Any], Any]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError(f"{HOST_READ}\nmore about it")
        call = partial(func, *args, **(kwargs or {}))
        outputs = call()
        self.calls.append((call, outputs))
        return outputs


class CpuGraphs:
    """Graphs of operations on the CPU: a replay repeats them on the tensors of the capture, without Python's part."""

    def __init__(self) -> None:
        self.num_eager = self.num_captured = self.num_replayed = 0

    def run_on_stream(self, work: Callable[[], T]) -> T:
        self.num_eager += 1
        return work()

    def capture(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        with RecordOperations() as recorded:
            outputs = work()
        self.num_captured += 1
        for tensor in tree_leaves(outputs):
            tensor.fill_(torch.nan)  # a capture computes nothing

        @torch.no_grad()
        def replay() -> None:
            self.num_replayed += 1
            for call, captured in recorded.calls:
                for old, new in zip(tree_leaves(captured), tree_leaves(call()), strict=True):
                    old.copy_(new)

        return outputs, replay


class Evaluations:
    """Evaluates raw and EMA weights of a model that trains in between, eagerly and with graphs."""

    def __init__(self, precision: str = "fp32", tta: str = "none", model: nn.Module | None = None) -> None:
        self.parts = Parts(precision, dropout=0.5)
        self.device = CpuGraphs()
        self.warnings: list[tuple[str, int]] = []
        self.graphs = EvalGraphs(self.device, lambda text, step: self.warnings.append((text, step)))
        self.models = {"raw": model or self.parts.model, "ema": self.parts.ema.model}
        self._tta = tta
        self._step = 0

    def train(self) -> None:
        self.parts.step(self._step, [batch(first=8 * self._step, dtype=self.parts.precision.input_dtype)])
        self._step += 1

    def eager(self, sizes: Sequence[int]) -> dict[str, Any]:
        return {weights: self._evaluate(self._inference_step(weights), sizes) for weights in self.models}

    def captured(self, sizes: Sequence[int]) -> dict[str, Any]:
        self.graphs.start_evaluation(self._step)
        steps = {
            weights: replace(self._inference_step(weights), run_captured=partial(self.graphs.run, weights))
            for weights in self.models
        }
        return {weights: self._evaluate(step, sizes) for weights, step in steps.items()}

    def _inference_step(self, weights: str) -> InferenceStep:
        return InferenceStep(self.models[weights], lambda b, _: b, self.parts.precision, self._tta)

    def _evaluate(self, step: InferenceStep, sizes: Sequence[int]) -> Any:
        dtype, metrics = self.parts.precision.input_dtype, ClassificationMetrics(10)
        batches = [batch(rows=rows, first=100 + 10 * number, dtype=dtype) for number, rows in enumerate(sizes)]
        evaluate(step, metrics, batches)
        return metrics.compute(), metrics.state()["rows"].tolist()


@pytest.mark.parametrize(("precision", "tta"), [("fp32", "none"), ("fp64", "flip-translate"), ("bf16", "none")])
def test_replayed_evaluations_equal_eager_ones_while_the_weights_change(precision: str, tta: str) -> None:
    """Captured once, with a short last batch; autocast casts the weights of the day, not those of the capture."""
    evaluations, sizes = Evaluations(precision, tta), (8, 8, 3)
    seen = []
    for _ in range(4):
        evaluations.train()
        expected = evaluations.eager(sizes)
        assert evaluations.captured(sizes) == expected
        seen.append(expected["raw"][0]["loss"])
        seen.append(expected["ema"][0]["loss"])
    assert len(set(seen)) == 8
    device = evaluations.device  # 2 models, 2 shapes, 3 batches, 3 evaluations after the first
    assert (device.num_eager, device.num_captured, device.num_replayed) == (6, 4, 18)
    assert evaluations.parts.model.training and not evaluations.warnings


def test_a_single_evaluation_captures_nothing() -> None:
    evaluations = Evaluations()
    evaluations.captured((8, 8, 8, 3))
    assert evaluations.device.num_captured == 0


def test_shapes_beyond_max_graphs_run_eagerly() -> None:
    evaluations, sizes = Evaluations(), range(1, MAX_GRAPHS)
    for _ in range(2):
        assert evaluations.captured(sizes) == evaluations.eager(sizes)
    assert evaluations.device.num_captured == MAX_GRAPHS


def test_outputs_are_not_overwritten_by_the_next_replay() -> None:
    evaluations, outputs = Evaluations(), []
    forward = InferenceStep(evaluations.models["ema"], lambda b, _: b, evaluations.parts.precision)
    for step in range(3):
        evaluations.graphs.start_evaluation(step)
        outputs += [evaluations.graphs.run("ema", forward, batch(first=first)) for first in (0, 8)]
    assert evaluations.device.num_replayed == 4
    for pair in (outputs[:2], outputs[2:4], outputs[4:]):
        assert torch.equal(pair[0], outputs[0]) and torch.equal(pair[1], outputs[1])
    assert not torch.equal(outputs[0], outputs[1])


class ReadsOnTheHost(nn.Module):
    """A network with control flow that depends on the images."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.network(images)
        return logits.flip(1) if float(images.mean()) > 0 else logits


def test_a_network_that_cannot_be_captured_is_evaluated_eagerly_with_one_warning() -> None:
    parts = Parts()
    evaluations, sizes = Evaluations(model=ReadsOnTheHost(parts.model)), (8, 8, 3)
    for step in range(4):
        evaluations.train()
        with torch.no_grad():
            parts.model.fc[1].bias.add_(0.1 * (step + 1) * torch.arange(10))
        assert evaluations.captured(sizes) == evaluations.eager(sizes)
    device = evaluations.device
    assert (device.num_captured, device.num_replayed) == (0, 0)
    [(text, at)] = evaluations.warnings
    assert at == 2 and text.endswith(f"({HOST_READ})")


class BenchmarkedCpu(Cpu):
    """A CPU with a setting for cuDNN, which it notes whenever a batch is sent."""

    limit: int | None = 4

    def __init__(self) -> None:
        super().__init__()
        self.limits_in_evaluation: set[int | None] = set()
        self.fails = False

    def set_cudnn_benchmark(self, limit: int | None) -> None:
        self.limit = limit

    def cudnn_benchmark_limit(self) -> int | None:
        return self.limit

    def send(self, batch: Batch) -> tuple[Batch, None]:
        self.limits_in_evaluation.add(self.limit)
        if self.fails:
            raise OSError("the device is gone")
        return super().send(batch)


@contextmanager
def open_run(folder: Path) -> Iterator[tuple[TrainingRun, TrainState]]:
    settings = {"ema.decay": 0.9, "evaluate.batch_size": 100, "evaluate.tta": "flip"}
    overrides = [(field, value, "test") for field, value in settings.items()]
    with TrainingRun.open("quickstart", overrides, out=folder / "run", device="cpu") as run:
        yield run, build_train_state(run, RunLogger())


def make_evaluator(run: TrainingRun, state: TrainState, device: Cpu, capture: CpuGraphs | None = None) -> Evaluator:
    run = replace(run, device=device)
    loader = build_eval_loader(run.recipe, run.datasets.val, device, run.plan.eval_batch)
    return Evaluator(run, state, loader, BadSamples(), capture)


def values(results: Sequence[EvalFinished]) -> list[Any]:
    return [(result.weights, result.metrics, result.num_samples) for result in results]


def test_the_evaluator_replays_raw_and_ema_but_not_weights_from_a_file(tmp_path: Path) -> None:
    with open_run(tmp_path) as (run, state):
        assert state.ema is not None
        capture = CpuGraphs()
        eager, graphed = (make_evaluator(run, state, Cpu(), graphs) for graphs in (None, capture))
        path = tmp_path / "other.safetensors"
        path.write_bytes(encode({name: 0.5 * tensor for name, tensor in state.network.model.state_dict().items()}))
        seen = []
        for step in range(1, 5):
            with torch.no_grad():
                for parameter in state.network.model.parameters():
                    parameter.mul_(0.9)
            state.ema.update(0.5, torch.tensor(True))
            expected = values(eager.evaluate(step, lambda: False))
            assert values(graphed.evaluate(step, lambda: False)) == expected
            seen += [metrics["loss"] for _, metrics, _ in expected]
            from_file = [evaluator.evaluate_file("averaged", path, step) for evaluator in (eager, graphed)]
            assert values(from_file[:1]) == values(from_file[1:])
        assert len(set(seen)) == 8
        # 360 images: 3 whole batches and a short one; the first evaluation is eager.
        assert (capture.num_eager, capture.num_captured, capture.num_replayed) == (8, 4, 24)


def test_evaluation_does_not_benchmark_algorithms_and_restores_the_setting(tmp_path: Path) -> None:
    with open_run(tmp_path) as (run, state):
        device = BenchmarkedCpu()
        evaluator = make_evaluator(run, state, device)
        evaluator.evaluate(1, lambda: False)
        assert device.limits_in_evaluation == {None} and device.limit == 4
        device.fails = True
        with pytest.raises(OSError, match="gone"):
            evaluator.evaluate(2, lambda: False)
        assert device.limit == 4
