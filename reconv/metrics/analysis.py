"""The analysis of an evaluation, for the report and `reconv eval --per-class`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from reconv.metrics.confusion import analyze_predictions
from reconv.metrics.detection import DetectionMetrics
from reconv.metrics.multilabel import MultilabelMetrics
from reconv.metrics.topk import ClassificationMetrics


def analyze_metrics(metrics: object, class_names: Sequence[str]) -> dict[str, Any] | None:
    """The analysis of a classifier or a detector as plain data; None for metrics that have none."""
    if isinstance(metrics, MultilabelMetrics):
        return metrics.analysis(class_names)
    if isinstance(metrics, DetectionMetrics):
        return metrics.result().analysis()
    if isinstance(metrics, ClassificationMetrics):
        return analyze_predictions(metrics.predictions(), class_names)
    return None
