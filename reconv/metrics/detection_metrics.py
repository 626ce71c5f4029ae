"""Scores of a detector over a validation set: the 12 COCO numbers, VOC's mean precision, and what lies behind them.

Owns what is kept of each image and which numbers are computed. Refuses to know how a network's outputs become
detections (a function it is given) and how scores are shown. Invariant: an image counts once, by its index; detections
stay on the device, padded, until a result is asked for or many have gathered, so no batch waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
from torch import Tensor

from reconv.batch import Batch
from reconv.data.boxes.annotations import Annotation
from reconv.detection.postprocess import Detections
from reconv.metrics.coco_eval import CocoScores, can_score_coco, coco_scores
from reconv.metrics.detection_errors import error_kinds, size_buckets
from reconv.metrics.overlaps import Overlaps, Scored, overlaps_of
from reconv.metrics.voc_eval import CURVE_RECALLS, ClassPrecision, class_precisions, voc_numbers

NUM_ON_DEVICE = 8192  # images; 200 detections of one are 7 kB
NUM_SHOWN = 8

Postprocess = Callable[[Any], Detections]
Truth = Callable[[int], Annotation]


class DetectionMetrics:
    """Detections of a validation set by the index of their image."""

    def __init__(self, postprocess: Postprocess, truth: Truth, class_names: Sequence[str]) -> None:
        self.num_samples = 0
        self._postprocess = postprocess
        self._truth = truth
        self._class_names = tuple(class_names)
        self._on_device: list[tuple[Tensor, Detections]] = []
        self._num_on_device = 0
        self._images: dict[int, Scored] = {}
        self._scores: DetectionScores | None = None  # of all that was seen so far

    def update(self, outputs: Any, batch: Batch) -> None:
        """Find the boxes in a network's outputs and keep them."""
        self._on_device.append((batch["indices"], self._postprocess(outputs)))
        self.num_samples += len(batch)
        self._num_on_device += len(batch)
        self._scores = None
        if self._num_on_device >= NUM_ON_DEVICE:
            self._read()

    def state(self) -> dict[int, Scored]:
        """What this rank has accumulated, as plain data for the others."""
        self._read()
        return self._images

    def merge(self, states: Sequence[dict[int, Scored]]) -> None:
        """Replace what was accumulated by the states of all ranks, this one included."""
        images = {index: scored for state in states for index, scored in state.items()}
        num_twice = sum(map(len, states)) - len(images)
        if num_twice:
            raise ValueError(f"{num_twice} images were scored twice")
        self._images, self.num_samples, self._scores = images, len(images), None

    def images(self) -> list[Scored]:
        """Every image in the order of the validation set."""
        self._read()
        return [self._images[index] for index in sorted(self._images)]

    def compute(self) -> dict[str, float]:
        """VOC's means, and the 12 COCO numbers where their library is installed, as fractions."""
        return self.scores().numbers

    def scores(self) -> DetectionScores:
        """Everything there is to know of the images seen so far."""
        if self._scores is None:
            self._scores = score(self.images(), self._class_names)
        return self._scores

    def _read(self) -> None:
        """Move what lies on the device to the host."""
        for indices, padded in self._on_device:
            found = padded.cpu()
            boxes, scores = found.boxes_xyxy.double().numpy(), found.scores.double().numpy()
            labels = found.labels.numpy()
            for row, (index, count) in enumerate(zip(indices.tolist(), found.counts.tolist(), strict=True)):
                if index in self._images:
                    raise ValueError(f"the image with index {index} was scored twice")
                truth = self._truth(index)
                sides = np.array([truth.width, truth.height, truth.width, truth.height], np.float64)
                self._images[index] = Scored(
                    index, truth, boxes[row, :count] * sides, scores[row, :count].copy(), labels[row, :count] - 1
                )
        self._on_device, self._num_on_device = [], 0


@dataclass(frozen=True, slots=True, eq=False)
class DetectionScores:
    """The numbers of a validation set, and what they are made of."""

    numbers: dict[str, float]
    class_names: tuple[str, ...]
    precisions: tuple[ClassPrecision, ...]
    coco: CocoScores | None
    overlaps: Overlaps
    num_images: int

    def findings(self) -> dict[str, Any]:
        """What the report shows, as plain data."""
        return {
            "num_images": self.num_images,
            "numbers": self.numbers,
            "classes": [self._class(precision) for precision in self.precisions],
            "curves": [
                {"name": "mean over the classes", "precision": self._mean_curve()},
                *({"name": self.class_names[p.label], "precision": _curve(p)} for p in self._shown()),
            ],
            "sizes": [asdict(bucket) for bucket in size_buckets(self.overlaps)],
            "errors": error_kinds(self.overlaps, len(self.class_names)),
        }

    def _class(self, precision: ClassPrecision) -> dict[str, Any]:
        is_known = precision.num_objects > 0
        row: dict[str, Any] = {
            "name": self.class_names[precision.label],
            "num_objects": precision.num_objects,
            "num_detections": precision.num_detections,
            "voc10": precision.voc10 if is_known else None,
            "recall": float(precision.recall[-1]) if len(precision.recall) else 0.0,
        }
        if self.coco is not None:
            row |= {"ap": self.coco.class_ap[precision.label], "ap50": self.coco.class_ap50[precision.label]}
        return row

    def _known(self) -> list[ClassPrecision]:
        return [precision for precision in self.precisions if precision.num_objects]

    def _shown(self) -> list[ClassPrecision]:
        """The classes whose curves are worth a look: all where they are few, else the best and the worst."""
        ranked = sorted(self._known(), key=lambda precision: -precision.voc10)
        half = (NUM_SHOWN - 1) // 2
        return ranked if len(ranked) < NUM_SHOWN else [*ranked[:half], *ranked[-half:]]

    def _mean_curve(self) -> list[float]:
        curves = [_curve(precision) for precision in self._known()]
        return [float(value) for value in np.mean(curves, axis=0)] if curves else [0.0] * len(CURVE_RECALLS)


def score(images: Sequence[Scored], class_names: Sequence[str]) -> DetectionScores:
    """The numbers of some images; VOC's alone where the COCO library is not installed."""
    overlaps = overlaps_of(images)
    precisions = class_precisions(overlaps, len(class_names))
    coco = coco_scores(images, len(class_names)) if can_score_coco() else None
    numbers = {**(coco.numbers if coco else {}), **voc_numbers(precisions)}
    return DetectionScores(numbers, tuple(class_names), tuple(precisions), coco, overlaps, len(images))


def _curve(precision: ClassPrecision) -> list[float]:
    """Precision at 101 recalls from 0 to 1."""
    return [round(float(value), 5) for value in precision.best_at(CURVE_RECALLS)]
