"""An invented analysis of a detector, for the tests of the report."""

from __future__ import annotations

from typing import Any

ERROR_KINDS = {"correct": "found it", "background": "is nothing", "missed": "was overlooked"}


def example_analysis(num_classes: int = 3, **changed: Any) -> dict[str, Any]:
    """The analysis of an evaluation with some classes, the first of which has no objects."""
    classes = [
        {"name": f"class {n}", "num_objects": 10 * n, "num_detections": 7, "voc10": 0.5 if n else None, "recall": 0.25}
        for n in range(num_classes)
    ]
    return {
        "step": 440,
        "weights": "raw",
        "partial": False,
        "num_images": 360,
        "metrics": {"voc10": 0.5, "ap_small": 0.125},
        "classes": classes,
        "curves": [{"name": "mean over classes", "precision": [1.0, 0.5, 0.0]}],
        "f1_curve": {
            "score": [0.0, 0.5, 1.0],
            "precision": [0.5, 0.75, 0.0],
            "recall": [0.6, 0.5, 0],
            "f1": [0.5, 0.6, 0],
        },
        "best_threshold": {"score": 0.5, "precision": 0.75, "recall": 0.5, "f1": 0.6},
        "sizes": [
            {"name": "small", "num_objects": 20, "num_found": 5},
            {"name": "large", "num_objects": 0, "num_found": 0},
        ],
        "errors": {"correct": 3, "background": 1, "missed": 6},
        "error_kinds": ERROR_KINDS,
        **changed,
    }
