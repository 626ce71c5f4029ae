"""The evaluations of a run: each scores the raw weights and the averaged ones, over all processes.

Owns that pass and the count of what it saw. Refuses to know how a score is computed. Invariant: each sample of the
validation set is in the result exactly once, or known to be bad.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from torch import nn

from reconv.checkpoint.load_weights import load_weights, read_weights
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.distributed.process_group import ProcessGroup
from reconv.inference.evaluate import EvaluationStopped, InferenceStep, evaluate
from reconv.logging.events import EvalFinished
from reconv.metrics.detection_metrics import DetectionMetrics
from reconv.metrics.topk import ClassificationMetrics
from reconv.optim import ModelEma
from reconv.tasks.task import Metrics
from reconv.trainer.build.loaders import AnyTask
from reconv.trainer.build.network import Network
from reconv.trainer.protocols import Prepare


@dataclass(slots=True)
class Evaluation:
    """Scores the raw weights, and the averaged ones where there are some."""

    network: Network
    average: ModelEma | None
    task: AnyTask
    loader: EvalLoader
    prepare: Prepare
    num_samples: int
    bad_samples: BadSamples
    process_group: ProcessGroup
    tta: str = "none"  # the views of an image whose answers are averaged
    is_partial: bool = False  # not all of the validation set is scored
    boundary: Callable[[], None] = lambda: None  # of the device
    last: ClassificationMetrics | DetectionMetrics | None = None
    last_weights: str = ""  # whose it is

    @property
    def chosen_weights(self) -> str:
        return "raw" if self.average is None else "ema"

    def __call__(self, done: int, epoch: float, stop_requested: Callable[[], bool]) -> list[EvalFinished]:
        results = [self._score("raw", self.network.model, done, epoch, stop_requested)]
        if self.average is not None:
            results.append(self._score("ema", self.average.model, done, epoch, stop_requested))
        return results

    def score_file(self, weights: str, path: Path, done: int, epoch: float) -> EvalFinished:
        """Score other weights of this network, under the name they go by."""
        model = copy.deepcopy(self.network.model).requires_grad_(False)
        tensors = self.process_group.on_rank0(lambda: read_weights(path))
        load_weights(model, tensors, strict=True, source=str(path))
        return self._score(weights, model, done, epoch, lambda: False)

    def _score(
        self, weights: str, model: nn.Module, done: int, epoch: float, stop_requested: Callable[[], bool]
    ) -> EvalFinished:
        start_s = time.perf_counter()
        evaluator = self.task.metrics()
        was_stopped = False
        try:
            step = InferenceStep(model, self.prepare, self.network.precision, self.tta)
            evaluate(step, evaluator, self.loader.after(done), stop_requested, self.boundary)
        except EvaluationStopped:
            was_stopped = True
        self._meet(evaluator, was_stopped)
        skipped = len(self.bad_samples.known("val"))
        if evaluator.num_samples + skipped != self.num_samples:
            raise AssertionError(f"evaluated {evaluator.num_samples} of {self.num_samples} samples")
        self.last, self.last_weights = evaluator, weights
        metrics = evaluator.compute()
        wall_s = time.perf_counter() - start_s
        return EvalFinished(
            done,
            epoch,
            weights,
            metrics,
            evaluator.num_samples,
            wall_s,
            best=False,
            partial=self.is_partial,
            skipped=skipped,
        )

    def _meet(self, evaluator: Metrics, was_stopped: bool) -> None:
        """Put together what all processes have found; if one was asked to stop, all have stopped."""
        if any(self.process_group.all_gather(was_stopped)):
            raise EvaluationStopped
        self.bad_samples.sync()
        if self.process_group.world_size > 1:
            evaluator.merge(self.process_group.all_gather(evaluator.state()))
