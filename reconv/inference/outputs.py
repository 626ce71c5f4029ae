"""From the outputs of a network to predictions: the best classes, the labels or the boxes of each image."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from reconv.core.confidence import ConfidenceCalibration
from reconv.core.errors import UsageError
from reconv.detection.postprocess import Detections
from reconv.inference.image_reader import ImageInfo, ImageSample
from reconv.inference.predictions import ClassScore, DetectedBox, Prediction
from reconv.kernels.ops.softmax_topk import softmax_topk, supports
from reconv.precision.policy import to_accumulate_dtype
from reconv.recipe.parts.evaluation import MULTILABEL_THRESHOLD

TOP_K = 5
MIN_SCORE = 0.3


@dataclass(frozen=True, slots=True)
class OutputClasses:
    """The task of a model and its classes, in the order of the network's outputs."""

    task: str
    names: tuple[str, ...]  # for people
    ids: tuple[int, ...] = ()  # detectors: the category ids of the training data
    confidence: ConfidenceCalibration | None = None  # of a classifier


@dataclass(frozen=True, slots=True)
class Selection:
    """Number and lowest score of the classes, labels or boxes kept of an image; None: the default of the task."""

    top: int | None = None
    min_score: float | None = None

    def check(self, task: str) -> None:
        """Refuse a limit of scores for a model that gives one class per image."""
        if self.min_score is not None and task == "classification":
            raise UsageError(
                "--min-score is for detectors and multi-label models, and this model gives one class per image",
                hint="omit --min-score",
            )


@contextmanager
def without_gc() -> Iterator[None]:
    """Without collections of cycles, of which predictions have none: each one visits every object of the process, and
    thousands of predictions in a second cause several."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def select_outputs(
    outputs: Any, classes: OutputClasses, selection: Selection, postprocess: Callable[[Any], Detections] | None
) -> Any:
    """Select the outputs for predictions, on the device: scores and labels [n, k], or detections."""
    task, confidence = classes.task, classes.confidence
    if task == "detection":
        assert postprocess is not None
        return postprocess(outputs)
    logits = to_accumulate_dtype(outputs)
    if task == "multilabel":
        return tuple(logits.sigmoid().sort(dim=1, descending=True, stable=True))
    k = min(selection.top or TOP_K, logits.shape[1])
    if confidence is not None:
        logits = logits / confidence.temperature
        k = max(k, confidence.most_classes(logits.shape[1]))
    return softmax_topk(logits, k) if supports(logits, k) else tuple(logits.softmax(dim=1).topk(k))


def make_predictions(
    selected: Any, samples: Sequence[ImageInfo | ImageSample], classes: OutputClasses, selection: Selection
) -> Iterator[Prediction]:
    """The prediction of each sample, from what `select_outputs` returned, on the host."""
    if isinstance(selected, Detections):
        yield from _boxes(selected, samples, classes, selection)
        return
    scores, labels = selected
    min_score = MULTILABEL_THRESHOLD if selection.min_score is None else selection.min_score
    names, is_multilabel = classes.names, classes.task == "multilabel"
    confidence = None if is_multilabel else classes.confidence
    for sample, row_scores, row_labels in zip(samples, scores.tolist(), labels.tolist(), strict=True):
        pairs = list(zip(row_scores, row_labels, strict=True))
        if is_multilabel:
            pairs = [pair for pair in pairs if pair[0] >= min_score][: selection.top]
        found = tuple([ClassScore(names[label], score, label) for score, label in pairs])
        if confidence is None:
            yield Prediction(sample.path, found, image=sample.image)
            continue
        members = (
            None if confidence.coverage is None else tuple(c.name for c in found if c.score >= confidence.threshold)
        )
        yield Prediction(sample.path, found[: selection.top or TOP_K], image=sample.image, prediction_set=members)


def _boxes(
    detections: Detections, samples: Sequence[ImageInfo | ImageSample], classes: OutputClasses, selection: Selection
) -> Iterator[Prediction]:
    threshold = MIN_SCORE if selection.min_score is None else selection.min_score
    for row, sample in enumerate(samples):
        found = boxes_in_pixels(detections, row, sample.width, sample.height, classes.names, classes.ids)
        boxes = [box for box in found if box.score >= threshold][: selection.top]
        yield Prediction(sample.path, boxes=tuple(boxes), image=sample.image)


def boxes_in_pixels(
    detections: Detections,
    row: int,
    width: int,
    height: int,
    class_names: Sequence[str],
    class_ids: Sequence[int] = (),
) -> Iterable[DetectedBox]:
    """The detections of one image of a batch, in pixels of that image, best score first."""
    count = int(detections.counts[row])
    boxes = (detections.boxes_xyxy[row, :count].double() * torch.tensor([width, height, width, height])).tolist()
    scores, labels = detections.scores[row, :count].tolist(), detections.labels[row, :count].tolist()
    for (left, top, right, bottom), score, label in zip(boxes, scores, labels, strict=True):
        class_id = class_ids[label - 1] if class_ids else None
        yield DetectedBox(class_names[label - 1], score, (left, top, right, bottom), label - 1, class_id)
