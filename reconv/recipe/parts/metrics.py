"""The metrics of each task: names, labels, and which are shown for every evaluation.

The arithmetic is in `metrics`; users' own metrics (the recipe field `metrics`) are in none of these lists.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Metric:
    """A value of an evaluation: a fraction that is better when larger, or a loss."""

    name: str
    label: str
    tasks: tuple[str, ...]
    is_headline: bool = True  # shown for each evaluation; a detector has more metrics than fit in a line


_CLASSIFICATION, _MULTILABEL, _DETECTION = ("classification",), ("multilabel",), ("detection",)
_SIZES = ("small", "medium", "large")
METRICS = (
    Metric("top1", "top-1", _CLASSIFICATION),
    Metric("top5", "top-5", _CLASSIFICATION),
    Metric("map", "mAP", _MULTILABEL),
    Metric("micro_f1", "micro F1", _MULTILABEL),
    Metric("macro_f1", "macro F1", _MULTILABEL),
    Metric("loss", "loss", (*_CLASSIFICATION, *_MULTILABEL)),
    Metric("ap", "AP", _DETECTION),
    Metric("ap50", "AP50", _DETECTION),
    Metric("ap75", "AP75", _DETECTION),
    *(Metric(f"ap_{size}", f"AP {size}", _DETECTION, is_headline=False) for size in _SIZES),
    *(Metric(f"ar{number}", f"AR{number}", _DETECTION, is_headline=False) for number in (1, 10, 100)),
    *(Metric(f"ar_{size}", f"AR {size}", _DETECTION, is_headline=False) for size in _SIZES),
    Metric("voc07", "VOC07 mAP", _DETECTION, is_headline=False),
    Metric("voc10", "VOC mAP", _DETECTION),
)
METRIC_NAMES = {
    task: tuple(metric.name for metric in METRICS if task in metric.tasks)
    for task in (*_CLASSIFICATION, *_MULTILABEL, *_DETECTION)
}
