"""The 12 COCO numbers, by hotcoco: a library that gives what pycocotools gives, in a fraction of the time.

Owns the names of the numbers and the way to the library and back. Refuses to know networks. Invariant: what the
library cannot measure (objects of a size that never occur) is absent, never -1 or 0.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reconv.errors import UsageError
from reconv.metrics.overlaps import Scored

COCO_NUMBERS = (
    *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
    *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
)
PACKAGE, EXTRA = "hotcoco", "detection"
INSTALL = f"pip install 'reconv[{EXTRA}]'"


@dataclass(frozen=True, slots=True)
class CocoScores:
    """The numbers by name, and each class's own; None: the class has no object."""

    numbers: dict[str, float]
    class_ap: tuple[float | None, ...]
    class_ap50: tuple[float | None, ...]


def can_score_coco() -> bool:
    """Whether the library is installed."""
    return importlib.util.find_spec(PACKAGE) is not None


def require_coco(why: str) -> None:
    """Refuse what needs the numbers where the library is not installed."""
    if not can_score_coco():
        raise UsageError(
            f"{why} is one of the 12 COCO numbers, and what computes them is not installed",
            why=f"the package {PACKAGE} is in no place that Python looks at",
            then=f"{INSTALL}; or judge by VOC's mean precision: --set detection.metric=voc10",
        )


def coco_scores(images: Sequence[Scored], num_classes: int) -> CocoScores:
    """Score every image, those without boxes or detections too."""
    from hotcoco import COCO, COCOeval

    truth = COCO.from_arrays(
        [
            {"id": place, "height": image.truth.height, "width": image.truth.width}
            for place, image in enumerate(images, 1)
        ],
        [{"id": label + 1, "name": str(label)} for label in range(num_classes)],
        _places(images, [len(image.truth) for image in images]),
        _joined([image.truth.labels + 1 for image in images]),
        _boxes_xywh([image.truth.boxes_xyxy for image in images]),
        area=_joined([image.truth.area.astype(np.float64) for image in images]),
        # COCO knows no difficult objects; what finds one is ignored, as what lies in a crowd.
        iscrowd=_joined([(image.truth.is_crowd | image.truth.difficult).astype(np.int64) for image in images]),
    )
    found = np.column_stack(
        [
            _places(images, [len(image.scores) for image in images]),
            _boxes_xywh([image.boxes_xyxy for image in images]),
            _joined([image.scores for image in images]),
            _joined([image.labels + 1 for image in images]),
        ]
    ).astype(np.float64)
    scorer = COCOeval(truth, truth.load_res(found), "bbox")
    scorer.evaluate()
    scorer.accumulate()
    scorer.summary_lines()  # computes `stats` as summarize() does, which would print them
    numbers = {name: float(value) for name, value in zip(COCO_NUMBERS, scorer.stats, strict=True)}
    precision = np.asarray(scorer.eval["precision"] if scorer.eval else [])  # overlap, recall, class, size, most
    ap, ap50 = (_class_means(precision[some, :, :, 0, -1], num_classes) for some in (slice(None), slice(0, 1)))
    return CocoScores({name: value for name, value in numbers.items() if value >= 0}, ap, ap50)


def _class_means(precision: npt.NDArray[np.float64], num_classes: int) -> tuple[float | None, ...]:
    """The mean over overlaps and recalls of [overlap, recall, class]; a class without objects has -1 everywhere."""
    columns = [precision[:, :, label] for label in range(num_classes)]
    return tuple(float(column.mean()) if column.size and column.min() >= 0 else None for column in columns)


def _places(images: Sequence[Scored], counts: Sequence[int]) -> npt.NDArray[np.int64]:
    return np.repeat(np.arange(1, len(images) + 1), counts)


def _joined(arrays: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    return np.concatenate(arrays) if arrays else np.zeros(0)


def _boxes_xywh(boxes_xyxy: Sequence[npt.NDArray[Any]]) -> npt.NDArray[np.float64]:
    boxes = np.concatenate([np.zeros((0, 4)), *boxes_xyxy]).astype(np.float64)
    boxes[:, 2:] -= boxes[:, :2]
    return boxes
