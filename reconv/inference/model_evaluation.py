"""Evaluating a loaded model on a dataset, and the result."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from reconv.build.checks import check_same_data
from reconv.build.code import code_digests
from reconv.build.data import build_eval_loader, few_images, limit_samples
from reconv.build.saved_model import ModelClasses, model_digest
from reconv.build.task import build_task
from reconv.core.batch import Batch
from reconv.core.confidence import ConfidenceCalibration
from reconv.core.errors import UsageError
from reconv.core.machine import Machine, cores_per_process
from reconv.core.version import __version__
from reconv.data.dataset import Dataset, Split
from reconv.data.pipeline.bad_samples import BadSamples
from reconv.data.pipeline.eval_loader import EvalLoader
from reconv.device import Device
from reconv.distributed.process_group import ProcessGroup
from reconv.distributed.shared_work import open_journal
from reconv.inference.backends.base import InferenceBackend, LogFunction
from reconv.inference.backends.choose import BackendChoice
from reconv.inference.eval_data import open_eval_set
from reconv.inference.eval_journal import JournaledMetrics
from reconv.inference.prediction_rows import PredictionRows
from reconv.metrics.analysis import analyze_metrics
from reconv.metrics.coco_eval import INSTALL, has_coco_eval
from reconv.metrics.confidence import FittedConfidence, fit_confidence
from reconv.metrics.topk import ClassificationMetrics
from reconv.recipe.schema import Recipe
from reconv.recipe.workers import AUTO_THREADS, IN_MEMORY
from reconv.storage.work_journal import WorkJournal
from reconv.tasks.base import Metrics
from reconv.tasks.evaluation import merge_ranks, update_metrics

_BAD_IMAGE_HINT = "`reconv data check PATH` lists all such images (data.bad_images of the run's recipe is stop)"


@dataclass(frozen=True, slots=True)
class EvalResult:
    """The metrics of one set of weights on the validation set."""

    path: Path
    step: int | None
    weights: str  # raw, ema or averaged
    metrics: dict[str, float]
    num_samples: int
    skipped: int = 0  # images that could not be read; they are not part of the metrics
    partial: bool = False  # only a part of the validation set was evaluated
    split: str = "val"
    data: str = ""  # what was evaluated, for people
    wall_s: float | None = field(
        default=None, compare=False
    )  # of the pass over the images; None: an earlier one did some
    analysis: Mapping[str, Any] | None = field(default=None, compare=False, repr=False)  # by class, where requested
    rows: PredictionRows | None = field(default=None, compare=False, repr=False)  # by image, where requested
    confidence: ConfidenceCalibration | None = None  # where requested, and where there were enough images
    confidence_note: str = ""
    few_images: Mapping[str, int] = field(default_factory=dict, compare=False)  # of classes with fewer than 10

    @property
    def images_per_s(self) -> float | None:
        return self.num_samples / self.wall_s if self.wall_s else None


@dataclass(frozen=True, slots=True)
class EvalRequest:
    """Images to evaluate: a split (validation) of `data`, else of the run's own data, or `samples` images of it."""

    data: str | Path | None = None
    split: Split | None = None
    batch_size: int | None = None
    samples: int | None = None
    per_class: bool = False
    journal_dir: Path | None = None  # where finished batches are kept until the caller has the result; None: nowhere
    rows: bool = False  # the result has a row for each image
    coverage: float | None = None  # of the prediction sets to fit; None: the confidence is not calibrated


@dataclass(frozen=True, slots=True)
class EvalModel:
    """A loaded model to evaluate."""

    module: nn.Module
    recipe: Recipe
    classes: ModelClasses
    backend_choice: BackendChoice
    device: Device
    path: Path
    step: int | None
    weights: str


def evaluate_model(
    model: EvalModel, request: EvalRequest, process_group: ProcessGroup | None, log: LogFunction
) -> EvalResult:
    """The metrics of a model; all ranks of a process group get the same result."""
    process_group = process_group or ProcessGroup.single()
    recipe, whole = model.recipe, open_eval_set(model.recipe, model.classes, request.data, request.split)
    if request.data is not None or request.split is not None:
        log(f"data: {whole.origin}")
    dataset = limit_samples(whole, request.samples)
    if request.rows and recipe.task != "classification":
        raise UsageError(
            f"there is no table of predictions for task: {recipe.task}",
            why="its rows have one class per image",
            hint="reconv predict RUN FOLDER --json FILE has every label or box",
        )
    if request.coverage is not None and recipe.task != "classification":
        raise UsageError(
            f"the confidence of task: {recipe.task} cannot be calibrated",
            why="temperature and prediction sets are for one class per image",
            hint="omit --calibrate",
        )
    check_same_data(process_group, dataset)
    if recipe.task == "detection" and not has_coco_eval():
        log(f"COCO metrics are not computed: {INSTALL}")
    task = build_task(recipe, dataset, model.device)
    bad = BadSamples(
        recipe.data.bad_images.limit,
        lambda bad: log(f"skipped {bad.path}: {bad.why}"),
        process_group.all_gather if process_group.world_size > 1 else None,
        _BAD_IMAGE_HINT,
    )
    batch_size = request.batch_size or recipe.evaluate.batch_size
    backend = model.backend_choice.for_evaluation(len(dataset))

    def step(batch: Batch) -> Any:
        return backend(batch["images"])

    def open_loader(finished: Collection[int]) -> EvalLoader:
        num_workers = _num_workers(recipe, dataset, process_group)
        return build_eval_loader(
            recipe, dataset, model.device, batch_size, num_workers, bad, process_group, finished=finished
        )

    start_s = time.perf_counter()
    plan = {"data": [dataset.fingerprint(), dataset.origin, len(dataset)], "batch_size": batch_size}
    plan |= {} if request.coverage is None else {"logits": True}
    with _open_journal(model, backend, plan, request.journal_dir, process_group) as journal, torch.no_grad():
        make_metrics = task.metrics if request.coverage is None else partial(_with_logits, task.metrics)
        journaled = JournaledMetrics.open(make_metrics, open_loader, journal, process_group)
        update_metrics(journaled, journaled.loader, step, step_boundary=model.device.step_boundary)
        journaled.finish_part()
    metrics = journaled.metrics
    merge_ranks(metrics, bad, process_group, journaled.kept)
    values = metrics.compute()
    wall_s = time.perf_counter() - start_s
    fitted = _fit_confidence(metrics, request)
    return EvalResult(
        model.path,
        model.step,
        model.weights,
        values,
        metrics.num_samples,
        skipped=len(bad.known("val")),
        partial=len(dataset) < len(whole),
        split=request.split or "val",
        data=whole.origin,
        wall_s=None if journaled.was_continued else wall_s,
        analysis=analyze_metrics(metrics, dataset.class_names) if request.per_class else None,
        rows=_rows(metrics, dataset, request),
        confidence=fitted.calibration,
        confidence_note=fitted.note,
        few_images=few_images(dataset, model.classes.display_names or model.classes.names),
    )


def _with_logits(make_metrics: Callable[[], Metrics]) -> Metrics:
    """Metrics that keep the logits of all images."""
    metrics = make_metrics()
    assert isinstance(metrics, ClassificationMetrics)
    metrics.keeps_logits = True
    return metrics


def _fit_confidence(metrics: Metrics, request: EvalRequest) -> FittedConfidence:
    """The calibrated confidence, where the request asks for it."""
    if request.coverage is None or not isinstance(metrics, ClassificationMetrics):
        return FittedConfidence(None, "")
    return fit_confidence(*metrics.logits(), request.coverage)


def _rows(metrics: Metrics, dataset: Dataset, request: EvalRequest) -> PredictionRows | None:
    """A row for each image, where the request asks for them."""
    if not (request.rows and isinstance(metrics, ClassificationMetrics)):
        return None
    return PredictionRows.of_table(metrics.predictions(), dataset, request.split or "val")


@contextmanager
def _open_journal(
    model: EvalModel,
    backend: InferenceBackend,
    plan: Mapping[str, Any],
    folder: Path | None,
    process_group: ProcessGroup,
) -> Iterator[WorkJournal | None]:
    """The journal of an evaluation: parts of another model, data, backend or version are not used."""
    if folder is None:
        yield None
        return
    decisive = {
        "model": model_digest(model.module, model.recipe, model.classes.names),
        "recipe": repr(model.recipe),
        "code": code_digests(model.recipe),
        "backend": [backend.name, backend.precision, model.backend_choice.calibration_folder, model.device.kind],
        "versions": [__version__, torch.__version__],
    }
    with open_journal(process_group, folder, {**plan, **decisive}) as journal:
        yield journal


def _num_workers(recipe: Recipe, dataset: Dataset, process_group: ProcessGroup) -> int:
    """The number of decoding threads: as in training, or one per core."""
    if recipe.data.num_workers != "auto":
        return recipe.data.num_workers
    if dataset.kind in IN_MEMORY:
        return 0
    return min(cores_per_process(Machine(), process_group.launch_env.local_world_size), AUTO_THREADS)
