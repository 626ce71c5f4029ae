"""The evaluations of a run on its validation set.

Every sample counts once, whatever the batch size and the number of ranks; images that cannot be read are counted.

If training steps are captured, evaluations replay their forward passes too: one graph for raw or EMA weights and
shape of batch, from the second evaluation on. Weights and running statistics are updated in place and never replaced,
so that a graph stays valid; weights from a file run eagerly. All graphs of a run are captured by one `CudaGraph` and
share its memory: outputs are cloned before the next replay. A capture that fails ends no run: evaluations are eager
from then on (tests/trainer/test_eval_graphs.py).

An evaluation of a part of the data is marked as partial wherever it is shown, and the recipe's expectation is not
checked against it (tests/trainer/test_evaluator.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from reconv.build.model import build_eval_preprocess
from reconv.checkpoint.load_weights import load_weights, read_weights
from reconv.core.batch import Batch
from reconv.core.errors import UsageError
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.device import without_cudnn_benchmark
from reconv.device.graphs import CallGraphs, GraphCapture, batch_shape
from reconv.logging.events import EvalFinished
from reconv.logging.phases import Phase, PhaseTimer
from reconv.metrics.confidence import MAX_LOGITS, fit_confidence
from reconv.metrics.detection import DetectionMetrics
from reconv.metrics.multilabel import MultilabelMetrics
from reconv.metrics.topk import ClassificationMetrics
from reconv.tasks.base import Metrics
from reconv.tasks.evaluation import EvaluationStopped, InferenceStep, RunCaptured, evaluate, merge_ranks
from reconv.trainer.train_state import TrainState

if TYPE_CHECKING:
    from reconv.trainer.run import TrainingRun


class Evaluator:
    """Evaluates the weights of a run, and their EMA if there is one, on all ranks."""

    def __init__(
        self,
        run: TrainingRun,
        train_state: TrainState,
        loader: EvalLoader,
        bad_samples: BadSamples,
        graph_capture: GraphCapture | None = None,
    ) -> None:
        """`graph_capture` captures forward passes as CUDA graphs; None: all run eagerly."""
        self._run = run
        self._state = train_state
        self._loader = loader
        self._bad_samples = bad_samples
        self._preprocess = build_eval_preprocess(run.recipe, train_state.network)
        self._graphs = (
            None if graph_capture is None else EvalGraphs(graph_capture, run.logger.warning, phases=run.phases)
        )
        self.metric = train_state.task.metric  # decides which checkpoint is best
        self.monitored_weights = train_state.monitored_weights
        self.is_partial = run.plan.num_val_left_out > 0
        self.last_metrics: ClassificationMetrics | MultilabelMetrics | DetectionMetrics | None = None
        self.last_weights = ""  # raw, ema or averaged
        self.last_step = 0

    def evaluate(self, step: int, stop_requested: Callable[[], bool]) -> list[EvalFinished]:
        """Evaluate after `step` steps; raises `EvaluationStopped` on all ranks if one was asked to stop."""
        models = {"raw": self._state.network.model}
        if self._state.ema is not None:
            models["ema"] = self._state.ema.model
        if self._graphs is None:
            return [self._evaluate(weights, model, step, stop_requested) for weights, model in models.items()]
        self._graphs.start_evaluation(step)
        return [
            self._evaluate(weights, model, step, stop_requested, partial(self._graphs.run, weights))
            for weights, model in models.items()
        ]

    def evaluate_file(self, weights: str, path: Path, step: int) -> EvalFinished:
        """Evaluate the weights in a file; `weights` is what the result calls them."""
        model = copy.deepcopy(self._state.network.model).requires_grad_(False)
        tensors = self._run.process_group.on_rank0(lambda: read_weights(path))
        load_weights(model, tensors, strict=True, source=str(path))
        return self._evaluate(weights, model, step, lambda: False)

    def _evaluate(
        self,
        weights: str,
        model: nn.Module,
        step: int,
        stop_requested: Callable[[], bool],
        run_captured: RunCaptured | None = None,
    ) -> EvalFinished:
        start_s = time.perf_counter()
        run, task = self._run, self._state.task
        metrics = task.metrics()
        coverage = self._coverage(step)
        if isinstance(metrics, ClassificationMetrics) and coverage is not None:
            metrics.keeps_logits = True
        was_stopped = False
        try:
            precision = self._state.network.precision
            inference_step = InferenceStep(model, self._preprocess, precision, run.recipe.evaluate.tta, run_captured)
            with without_cudnn_benchmark(run.device):
                evaluate(inference_step, metrics, self._loader.after(step), stop_requested, run.device.step_boundary)
        except EvaluationStopped:
            was_stopped = True
        self._merge_ranks(metrics, was_stopped)
        skipped = len(self._bad_samples.known("val"))
        if metrics.num_samples + skipped != run.plan.num_val:
            raise AssertionError(f"evaluated {metrics.num_samples} of {run.plan.num_val} samples")
        self.last_metrics, self.last_weights, self.last_step = metrics, weights, step
        values = metrics.compute()
        if self.metric not in values:
            raise UsageError(
                f"evaluate.best_metric: there is no metric {self.metric}",
                where="evaluate.best_metric",
                why=f"the evaluation has {', '.join(values)}",
                hint="correct the name and start the run again",
            )
        return EvalFinished(
            step,
            step / run.plan.steps_per_epoch,
            weights,
            values,
            metrics.num_samples,
            wall_s=time.perf_counter() - start_s,
            best=False,
            partial=self.is_partial,
            skipped=skipped,
            confidence=self._fit_confidence(metrics, step, weights, coverage),
        )

    def _coverage(self, step: int) -> float | None:
        """The coverage of prediction sets that are fitted after a step: the last one, or any that may be the last."""
        recipe, plan = self._run.recipe, self._run.plan
        may_end = recipe.early_stopping.target != "off" or recipe.early_stopping.patience != "off"
        is_small = plan.num_val * plan.num_classes <= MAX_LOGITS
        if recipe.evaluate.coverage == "off" or not is_small or not (may_end or step >= plan.total_steps):
            return None
        return recipe.evaluate.coverage

    def _fit_confidence(self, metrics: Metrics, step: int, weights: str, coverage: float | None) -> dict[str, Any]:
        """The calibration as plain data; empty where none is fitted."""
        if coverage is None or not (isinstance(metrics, ClassificationMetrics) and metrics.keeps_logits):
            return {}

        def fit() -> tuple[dict[str, Any], str]:
            fitted = fit_confidence(*metrics.logits(), coverage)
            return {} if fitted.calibration is None else fitted.calibration.to_dict(), fitted.note

        values, note = self._run.process_group.on_rank0(fit)
        if step >= self._run.plan.total_steps and weights == self.monitored_weights:
            self._run.logger.info(note, step)
        return values

    def _merge_ranks(self, metrics: Metrics, was_stopped: bool) -> None:
        process_group = self._run.process_group
        if any(process_group.all_gather(was_stopped)):
            raise EvaluationStopped
        merge_ranks(metrics, self._bad_samples, process_group)


@dataclass(slots=True)
class EvalGraphs:
    """Runs a forward pass eagerly in the first evaluation, and captures it in the second.

    If that fails, as for a network that reads a value on the host, evaluations run eagerly from then on.
    """

    device: GraphCapture
    warn: Callable[[str, int], None]  # text, step
    phases: PhaseTimer = field(default_factory=PhaseTimer)
    _graphs: CallGraphs[Any] = field(init=False)
    _seen: set[Hashable] = field(default_factory=set)  # run eagerly in this evaluation
    _warm: set[Hashable] = field(default_factory=set)  # run eagerly in an earlier one
    _is_disabled: bool = False
    _step: int = 0

    def __post_init__(self) -> None:
        self._graphs = CallGraphs(self.device, _cloned, partial(self.phases.during, Phase.KERNELS))

    def start_evaluation(self, step: int) -> None:
        """Begin the evaluation after `step` steps, which captures what those before have run eagerly."""
        self._step = step
        self._warm |= self._seen
        self._seen.clear()

    def run(self, weights: str, forward: Callable[[Batch], Any], batch: Batch) -> Any:
        """The outputs for a batch. `forward` reads its images only; `weights` names the model, always the same one."""
        images = Batch({"images": batch["images"]}, batch.positions, batch.groups)
        key = (weights, batch_shape(images))
        is_due = key in self._warm and key not in self._graphs and not self._graphs.is_full
        if is_due and not self._is_disabled:
            self._try_capture(key, forward, images)
        if self._is_disabled:
            return forward(batch)
        if key in self._graphs:
            return self._graphs.replay(key, (), [images])
        self._seen.add(key)
        return self.device.run_on_stream(lambda: forward(images))

    def _try_capture(self, key: Hashable, forward: Callable[[Batch], Any], images: Batch) -> None:
        try:
            self._graphs.capture(key, lambda _, batches: forward(batches[0]), (), [images])
        except Exception as error:
            self._is_disabled = True
            self._graphs.clear()
            why = str(_first_cause(error)).strip().partition("\n")[0]
            text = f"evaluations run without CUDA graphs, which takes longer: capturing one failed ({why})"
            self.warn(text, self._step)


def _first_cause(error: BaseException) -> BaseException:
    """The error of the network itself: after it, torch raises another one because the capture cannot end."""
    while error.__context__ is not None:
        error = error.__context__
    return error


def _cloned(outputs: Any) -> Any:
    """The tensors of the outputs in memory of their own."""
    return tree_map_only(Tensor, torch.clone, outputs)
