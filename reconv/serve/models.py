"""The models of a server: loaded on each device, run in batches, replaced when their run has a new checkpoint.

A request is bound to one loaded checkpoint when it begins. `--follow` replaces the reference, and the old checkpoint
ends with its last request (tests/serve/test_server_lifecycle.py).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from reconv.api import ImageSample, Prediction, Predictor
from reconv.core.errors import UsageError
from reconv.precision.policy import to_accumulate_dtype
from reconv.serve.batching import Batcher, Job
from reconv.serve.explanation import explain


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """Options of a client's request; jobs with equal options share their post-processing."""

    top: int | None = None
    min_score: float | None = None
    explain: bool = False
    is_raw: bool = False  # of a classifier, the logits and probabilities of all classes


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """Settings for batching images of different requests."""

    max_batch: int = 16
    max_wait_s: float = 0.002
    max_queue: int = 256


class LoadedModel:
    """One checkpoint on its devices, with its queue."""

    def __init__(
        self,
        predictors: Sequence[Predictor],
        info: Mapping[str, Any],
        settings: BatchSettings,
        on_batch: Callable[[int, float], None],
    ) -> None:
        self.predictors = tuple(predictors)
        self.info = info  # for `/models`
        self._lock = threading.Lock()
        self._users = 0
        self._is_retired = False
        for predictor in self.predictors:
            predictor.warm_up(batch_sizes(settings.max_batch))
        self.batcher = Batcher(
            [partial(run_jobs, predictor) for predictor in self.predictors],
            max_batch=settings.max_batch,
            max_wait_s=settings.max_wait_s,
            max_queue=settings.max_queue,
            on_batch=on_batch,
        )

    @property
    def predictor(self) -> Predictor:
        """The first of its replicas, which are equal."""
        return self.predictors[0]

    def acquire(self) -> bool:
        """Use this checkpoint until `release`; False: it has been replaced."""
        with self._lock:
            self._users += not self._is_retired
            return not self._is_retired

    def release(self) -> None:
        """End one use; the last one of a replaced checkpoint ends its threads."""
        with self._lock:
            self._users -= 1
            is_last = self._is_retired and self._users == 0
        if is_last:
            self.batcher.close(timeout_s=0)

    def retire(self) -> None:
        """Let requests that use this checkpoint finish, and no other begin."""
        with self._lock:
            self._is_retired = True
            is_last = self._users == 0
        if is_last:
            self.batcher.close(timeout_s=0)


@dataclass(slots=True)
class ServedModel:
    """A model by its name; `current` is replaced by `--follow`."""

    name: str
    run: str
    current: LoadedModel | None = None  # None: it is being loaded
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    def acquire(self) -> LoadedModel | None:
        """The current checkpoint, in use until its `release`; None while the first one is loaded."""
        while True:
            loaded = self.current
            if loaded is None or loaded.acquire():
                return loaded

    def replace(self, loaded: LoadedModel) -> None:
        """Use another checkpoint from now on; requests that have begun finish with the old one."""
        with self._lock:
            old, self.current = self.current, loaded
        if old is not None:
            old.retire()


def name_models(runs: Sequence[str]) -> dict[str, ServedModel]:
    """The models by their names: NAME=RUN, or `default_name`."""
    models: dict[str, ServedModel] = {}
    for run in runs:
        name, equals, path = run.partition("=")
        if not equals:
            name, path = default_name(run), run
        if name in models:
            hint = f"name them: reconv serve first={models[name].run} second={path}"
            raise UsageError(f"two models are named {name!r}", hint=hint)
        if not name or "/" in name:
            raise UsageError(f"{name!r} is not a name for a model", hint="use NAME=RUN, without slashes in NAME")
        models[name] = ServedModel(name, path)
    return models


def default_name(run: str) -> str:
    """A name for a run: `quickstart` for runs/quickstart/1, the stem of a weights file, or as it was given."""
    path = Path(run)
    if path.parent.name == "checkpoints":
        path = path.parent.parent
    name = path.parent.name if path.name.isdecimal() and path.parent.name else path.name
    return (name.removesuffix(".safetensors") or "model").replace(":", "-")


def describe_model(served: ServedModel) -> dict[str, Any]:
    """Description of a model for `/models`."""
    loaded = served.current
    return {"name": served.name, "ready": loaded is not None, **({} if loaded is None else loaded.info)}


def batch_sizes(max_batch: int) -> list[int]:
    """The batch sizes to prepare: powers of two up to the largest batch."""
    return sorted({*(1 << power for power in range((max_batch - 1).bit_length())), max_batch})


def run_jobs(predictor: Predictor, jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """Run jobs with equal options as one batch; the predictions of each job, as plain data."""
    options: PredictOptions = jobs[0].options
    samples = [sample for job in jobs for sample in job.samples]
    if options.is_raw and not predictor.is_detector:
        rows = iter(_raw_rows(predictor, samples))
        return [[next(rows) for _ in job.samples] for job in jobs]
    predictions = iter(predictor.predict_samples(samples, top=options.top, min_score=options.min_score))
    return [[_to_dict(predictor, sample, next(predictions), options) for sample in job.samples] for job in jobs]


def _raw_rows(predictor: Predictor, samples: Sequence[ImageSample]) -> list[dict[str, Any]]:
    """The logits and probabilities of each image, computed as those of its prediction."""
    logits = predictor.logits(samples)
    exact = to_accumulate_dtype(logits)
    temperature = 1.0 if predictor.confidence is None else predictor.confidence.temperature
    is_multilabel = predictor.recipe.task == "multilabel"
    probabilities = exact.sigmoid() if is_multilabel else (exact / temperature).softmax(dim=1)
    rows = zip(logits.float().numpy(), probabilities.numpy(), strict=True)
    return [{"logits": row, "probabilities": row_probabilities} for row, row_probabilities in rows]


def _to_dict(
    predictor: Predictor, sample: ImageSample, prediction: Prediction, options: PredictOptions
) -> dict[str, Any]:
    found = prediction.to_dict()
    del found["path"]
    found |= {"width": sample.width, "height": sample.height}
    if options.explain:
        found["explanation"] = explain(predictor, sample, prediction)
    return found
