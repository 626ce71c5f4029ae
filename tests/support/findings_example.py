"""Findings of a detector, made up for the report's tests."""

from __future__ import annotations

from typing import Any

KINDS = {"right": "is right", "background": "is nothing", "missed": "was overlooked"}


def example_findings(num_classes: int = 3, **changed: Any) -> dict[str, Any]:
    """What an evaluation over some classes found, the first without objects."""
    classes = [
        {"name": f"class {n}", "num_objects": 10 * n, "num_detections": 7, "voc10": 0.5 if n else None, "recall": 0.25}
        for n in range(num_classes)
    ]
    return {
        "step": 440,
        "weights": "raw",
        "partial": False,
        "kinds": KINDS,
        "num_images": 360,
        "numbers": {"voc10": 0.5, "ap_small": 0.125},
        "classes": classes,
        "curves": [{"name": "mean over the classes", "precision": [1.0, 0.5, 0.0]}],
        "sizes": [
            {"name": "small", "num_objects": 20, "num_found": 5},
            {"name": "large", "num_objects": 0, "num_found": 0},
        ],
        "errors": {"right": 3, "background": 1, "missed": 6},
        **changed,
    }
