"""Metrics of a detector on a validation set: COCO and VOC average precision, and the analysis behind them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from reconv.core.batch import Batch
from reconv.detection.annotation import Annotation
from reconv.detection.postprocess import Detections
from reconv.metrics.coco_eval import CocoResult, evaluate_coco, has_coco_eval
from reconv.metrics.detection_errors import ERROR_KINDS, count_error_kinds, recall_by_size
from reconv.metrics.detection_matches import DetectionMatches, ImageDetections, match_detections
from reconv.metrics.state import MetricsState
from reconv.metrics.voc_eval import CURVE_RECALLS, PrecisionRecall, f1_curve, precision_recall_by_class, voc_metrics

MAX_IMAGES_ON_DEVICE = 8192  # 200 detections of an image take 7 kB
MAX_CURVES = 8

Postprocess = Callable[[Any], Detections]
GroundTruth = Callable[[int], Annotation]  # of the image with this index


class DetectionMetrics:
    """Accumulates the detections of each image by its index; an image counts once.

    Detections stay on the device until a result is needed or there are many, so that no batch waits for the host.
    """

    def __init__(self, postprocess: Postprocess, truth: GroundTruth, class_names: Sequence[str]) -> None:
        self.num_samples = 0
        self._postprocess = postprocess
        self._truth = truth
        self._class_names = tuple(class_names)
        self._on_device: list[tuple[Tensor, Detections]] = []
        self._num_on_device = 0
        self._images: dict[int, ImageDetections] = {}
        self._result: DetectionResult | None = None  # None: not computed since the last update

    def update(self, outputs: Any, batch: Batch) -> None:
        """Add the detections in a model's outputs for a batch with `indices`."""
        self._on_device.append((batch["indices"], self._postprocess(outputs)))
        self.num_samples += len(batch)
        self._num_on_device += len(batch)
        self._result = None
        if self._num_on_device >= MAX_IMAGES_ON_DEVICE:
            self._move_to_host()

    def state(self) -> MetricsState:
        """The detections of all images, one after the other; every rank has the ground truth."""
        images = self.images()
        return {
            "indices": np.array([image.index for image in images], np.int64),
            "counts": np.array([len(image.scores) for image in images], np.int64),
            "boxes_xyxy": np.concatenate([np.zeros((0, 4)), *(image.boxes_xyxy for image in images)]),
            "scores": np.concatenate([np.zeros(0), *(image.scores for image in images)]),
            "labels": np.concatenate([np.zeros(0, np.int64), *(image.labels for image in images)]),
        }

    def merge(self, states: Sequence[MetricsState]) -> None:
        """Replace what was accumulated by these states, which include its own."""
        images = {image.index: image for state in states for image in self._images_of(state)}
        num_twice = sum(len(state["indices"]) for state in states) - len(images)
        if num_twice:
            raise ValueError(f"{num_twice} images were evaluated twice")
        self._images, self.num_samples, self._result = images, len(images), None

    def _images_of(self, state: MetricsState) -> Iterator[ImageDetections]:
        ends = np.cumsum(state["counts"])
        columns = (np.split(state[name], ends)[:-1] for name in ("boxes_xyxy", "scores", "labels"))
        for index, boxes, scores, labels in zip(state["indices"].tolist(), *columns, strict=True):
            yield ImageDetections(index, self._truth(index), boxes, scores, labels)

    def images(self) -> list[ImageDetections]:
        """Every image in the order of the validation set."""
        self._move_to_host()
        return [self._images[index] for index in sorted(self._images)]

    def compute(self) -> dict[str, float]:
        """The VOC metrics, and the COCO metrics if hotcoco is installed, as fractions."""
        return self.result().metrics

    def result(self) -> DetectionResult:
        """The metrics and the analysis of all images so far."""
        if self._result is None:
            self._result = evaluate_detections(self.images(), self._class_names)
        return self._result

    def _move_to_host(self) -> None:
        for indices, on_device in self._on_device:
            detections = on_device.cpu()
            boxes, scores = detections.boxes_xyxy.double().numpy(), detections.scores.double().numpy()
            labels = detections.labels.numpy()
            for row, (index, count) in enumerate(zip(indices.tolist(), detections.counts.tolist(), strict=True)):
                if index in self._images:
                    raise ValueError(f"the image with index {index} was evaluated twice")
                truth = self._truth(index)
                size = np.array([truth.width, truth.height, truth.width, truth.height], np.float64)
                self._images[index] = ImageDetections(
                    index, truth, boxes[row, :count] * size, scores[row, :count].copy(), labels[row, :count] - 1
                )
        self._on_device, self._num_on_device = [], 0


@dataclass(frozen=True, slots=True, eq=False)
class DetectionResult:
    """The metrics of a validation set, and what they were computed from."""

    metrics: dict[str, float]
    class_names: tuple[str, ...]
    curves: tuple[PrecisionRecall, ...]  # of each class
    coco: CocoResult | None
    matches: DetectionMatches
    num_images: int

    def analysis(self) -> dict[str, Any]:
        """Curves, sizes, error kinds and classes as plain data, for the report."""
        return {
            "num_images": self.num_images,
            "metrics": self.metrics,
            "classes": [self._class_row(curve) for curve in self.curves],
            "curves": [
                {"name": "mean over classes", "precision": self._mean_curve()},
                *({"name": self.class_names[curve.label], "precision": _points(curve)} for curve in self._selected()),
            ],
            **self._f1_curve(),
            "sizes": [asdict(size) for size in recall_by_size(self.matches)],
            "errors": count_error_kinds(self.matches, len(self.class_names)),
            "error_kinds": ERROR_KINDS,
        }

    def _f1_curve(self) -> dict[str, Any]:
        """Precision, recall and F1 by score threshold, and the threshold with the highest F1."""
        curve = f1_curve(self.curves)
        columns = {"score": curve.scores, "precision": curve.precision, "recall": curve.recall, "f1": curve.f1}
        rounded = {name: [round(value, 5) for value in column.tolist()] for name, column in columns.items()}
        return {
            "f1_curve": rounded,
            "best_threshold": {name: column[curve.best] for name, column in rounded.items()},
        }

    def _class_row(self, curve: PrecisionRecall) -> dict[str, Any]:
        row: dict[str, Any] = {
            "name": self.class_names[curve.label],
            "num_objects": curve.num_objects,
            "num_detections": curve.num_detections,
            "voc10": curve.voc10 if curve.num_objects else None,
            "recall": float(curve.recall[-1]) if len(curve.recall) else 0.0,
        }
        if self.coco is not None:
            row |= {"ap": self.coco.class_ap[curve.label], "ap50": self.coco.class_ap50[curve.label]}
        return row

    def _with_objects(self) -> list[PrecisionRecall]:
        return [curve for curve in self.curves if curve.num_objects]

    def _selected(self) -> list[PrecisionRecall]:
        """All classes if there are few, else the best and the worst."""
        ranked = sorted(self._with_objects(), key=lambda curve: -curve.voc10)
        half = (MAX_CURVES - 1) // 2
        return ranked if len(ranked) < MAX_CURVES else [*ranked[:half], *ranked[-half:]]

    def _mean_curve(self) -> list[float]:
        curves = [_points(curve) for curve in self._with_objects()]
        return [float(value) for value in np.mean(curves, axis=0)] if curves else [0.0] * len(CURVE_RECALLS)


def evaluate_detections(images: Sequence[ImageDetections], class_names: Sequence[str]) -> DetectionResult:
    """The metrics of some images; only those of VOC if hotcoco is not installed."""
    matches = match_detections(images)
    curves = precision_recall_by_class(matches, len(class_names))
    coco = evaluate_coco(images, len(class_names)) if has_coco_eval() else None
    metrics = {**(coco.metrics if coco else {}), **voc_metrics(curves)}
    return DetectionResult(metrics, tuple(class_names), tuple(curves), coco, matches, len(images))


def _points(curve: PrecisionRecall) -> list[float]:
    """The interpolated precision at 101 recalls from 0 to 1."""
    return [round(float(value), 5) for value in curve.interpolated(CURVE_RECALLS)]
