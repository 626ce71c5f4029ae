"""The analysis of an invented classifier, for the tests of the report."""

from __future__ import annotations

from typing import Any

import numpy as np

from reconv.metrics.confusion import analyze_predictions
from reconv.metrics.topk import PredictionTable


def classification_example(num_classes: int = 4, *, first: str = "class 0", **changed: Any) -> dict[str, Any]:
    """The analysis of 10 images per class, of which class c has c % 4 wrong: taken for the class after it."""
    target = np.repeat(np.arange(num_classes), 10)
    is_wrong = np.arange(10 * num_classes) % 10 < target % 4
    predicted = np.where(is_wrong, (target + 1) % num_classes, target)
    confidence = np.where(is_wrong, 0.55, 0.95)
    index = np.arange(10 * num_classes)
    table = PredictionTable(index, target, predicted, target, confidence, 1 - confidence, -np.log(confidence))
    names = [first, *(f"class {n}" for n in range(1, num_classes))]
    about = {"step": 440, "weights": "raw", "partial": False}
    return {**about, **analyze_predictions(table, names), **changed}
