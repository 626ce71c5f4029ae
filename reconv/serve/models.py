"""The models of a server: loaded on each device, run in batches, replaced when their run has a new checkpoint."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from reconv.api import Prediction, Predictor
from reconv.serve.batching import Batcher, Job
from reconv.serve.explain import explain


@dataclass(frozen=True, slots=True)
class PredictOptions:
    """What a client asks for; jobs with equal options share their post-processing."""

    top: int | None = None
    min_score: float | None = None
    explain: bool = False


@dataclass(frozen=True, slots=True)
class BatchSettings:
    """How images of different requests are put together."""

    max_batch: int = 16
    max_wait_s: float = 0.002
    max_queue: int = 256


class LoadedModel:
    """One checkpoint on its devices, with its queue."""

    def __init__(
        self, predictors: Sequence[Predictor], settings: BatchSettings, on_batch: Callable[[int, float], None]
    ) -> None:
        self.predictors = tuple(predictors)
        self._lock = threading.Lock()
        self._users = 0
        self._is_retired = False
        for predictor in self.predictors:
            warm_up(predictor, settings.max_batch)
        self.batcher = Batcher(
            [lambda jobs, predictor=predictor: run_jobs(predictor, jobs) for predictor in self.predictors],
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
        """Let those who use this checkpoint finish, and nobody else begin."""
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


def describe_model(served: ServedModel) -> dict[str, Any]:
    """What `/models` says about a model."""
    loaded = served.current
    if loaded is None:
        return {"name": served.name, "ready": False}
    predictor = loaded.predictor
    preprocess = predictor.recipe.data.preprocess
    return {
        "name": served.name,
        "ready": True,
        "task": predictor.recipe.task,
        "network": predictor.recipe.model.name,
        "classes": list(predictor.classes),
        "size": preprocess.size,
        "channels": preprocess.channels,
        "step": predictor.step,
        "weights": predictor.weights,
        "devices": [str(replica.device.kind) for replica in loaded.predictors],
        "backend": getattr(getattr(predictor, "backend", None), "name", "eager"),
        "precision": getattr(getattr(predictor, "backend", None), "precision", "float32"),
        "metrics": {},
        "card": "",
    }


def read_image(predictor: Predictor, image: bytes) -> Any:
    """The image as the network sees it; raises `DataError`."""
    return predictor._read(image, skip_bad=False)


def warm_up(predictor: Predictor, max_batch: int) -> None:
    """Run the network once with the smallest and the largest batch."""
    import numpy as np

    preprocess = predictor.recipe.data.preprocess
    blank = np.zeros((preprocess.size, preprocess.size, preprocess.channels), np.uint8)
    for size in dict.fromkeys((1, max_batch)):
        predictor.predict([blank] * size, batch_size=size)


def run_jobs(predictor: Predictor, jobs: Sequence[Job]) -> list[list[dict[str, Any]]]:
    """Run the jobs as one batch; the predictions of each job, as plain data."""
    samples = [sample for job in jobs for sample in job.samples]
    outputs, _ = predictor.inference_step(predictor._collate(samples))
    results: list[list[dict[str, Any]]] = [[] for _ in jobs]
    for options in dict.fromkeys(job.options for job in jobs):
        rows, owners, chosen = [], [], []
        row = 0
        for number, job in enumerate(jobs):
            if job.options == options:
                rows += range(row, row + len(job.samples))
                owners += [number] * len(job.samples)
                chosen += job.samples
            row += len(job.samples)
        part = outputs if len(rows) == len(samples) else _select(outputs, rows)
        predictions = _postprocess(predictor, part, chosen, options)
        for number, sample, prediction in zip(owners, chosen, predictions, strict=True):
            results[number].append(_to_dict(predictor, sample, prediction, options))
    return results


def _select(outputs: Any, rows: list[int]) -> Any:
    """Rows of the network's outputs."""
    if hasattr(outputs, "_replace"):
        return type(outputs)(*(tensor[rows] for tensor in outputs))
    return outputs[rows]


def _postprocess(
    predictor: Predictor, outputs: Any, samples: Sequence[Any], options: PredictOptions
) -> list[Prediction]:
    from reconv.metrics.multilabel_metrics import THRESHOLD

    if predictor.is_detector:
        to_predictions = predictor._to_boxes(options.top, options.min_score)
    elif predictor.recipe.task == "multilabel":
        to_predictions = predictor._to_labels(
            options.top, THRESHOLD if options.min_score is None else options.min_score
        )
    else:
        to_predictions = predictor._to_classes(options.top)
    return list(to_predictions(outputs, samples))


def _to_dict(predictor: Predictor, sample: Any, prediction: Prediction, options: PredictOptions) -> dict[str, Any]:
    found = prediction.to_dict()
    del found["path"]
    found |= {"width": sample.width, "height": sample.height}
    if options.explain:
        found |= explain(predictor, sample, prediction)
    return found
