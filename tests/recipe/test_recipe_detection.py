"""Rules of the detection section."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from reconv.recipe.schema import Recipe
from reconv.recipe.unused import unused_options

GOOD: dict[str, Any] = {
    "task": "detection",
    "data": {"preprocess": {"resize": None, "size": 300}},
    "augment": {"crop": "none"},
}


def test_the_defaults_are_the_published_detector() -> None:
    section = Recipe(**GOOD).detection
    assert [round(300 * scale) for scale in section.anchors.scales] == [21, 45, 99, 153, 207, 261, 315]
    assert section.anchors.per_cell == (4, 6, 6, 6, 4, 4)
    assert (section.anchors.variances, section.match_iou, section.negative_ratio) == ((0.1, 0.2), 0.5, 3)
    assert (section.score_threshold, section.nms_iou, section.topk_candidates, section.detections_per_image) == (
        0.05,
        0.5,
        200,
        200,
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"loss": {"label_smoothing": 0.1}}, "loss.label_smoothing: is for task: classification"),
        ({"distill": {"teacher": "runs/x"}}, "distill.teacher: is for task: classification"),
        ({"evaluate": {"tta": "flip"}}, "evaluate.tta: is for task: classification"),
        ({"augment": {"crop": "none", "size": 128}}, "augment.size: detection trains on images of"),
        (
            {"augment": {"crop": "none", "progressive_resizing": [["0ep", 128]]}},
            "augment.progressive_resizing: detection trains",
        ),
        ({"detection": {"anchors": {"scales": [0.1, 0.2]}}}, "detection.anchors.scales: has 2, but the 6 maps"),
        (
            {"detection": {"anchors": {"aspect_ratios": [], "scales": [0.1]}}},
            "detection.anchors.aspect_ratios: needs a list for each",
        ),
        (
            {"detection": {"anchors": {"aspect_ratios": [[1.0]], "scales": [0.1, 0.2]}}},
            "detection.anchors.aspect_ratios: 1 is a square",
        ),
        (
            {"detection": {"anchors": {"aspect_ratios": [[]], "scales": [0.3, 0.2]}}},
            "detection.anchors.scales: must rise",
        ),
        ({"expect": {"metric": "top1", "value": 0.5}}, "expect.metric: top1 is not reported by detection"),
        ({"expect": {"metric": "ap50", "value": 0.5}}, "expect.metric: ap50 is promised, but detection.metric"),
    ],
)
def test_what_detection_would_ignore_or_cannot_do_is_refused(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Recipe(**{**GOOD, **fields})


def test_the_detection_section_has_no_effect_on_classification_and_that_is_said() -> None:
    unused = dict(unused_options(Recipe(detection={"score_threshold": 0.3})))  # type: ignore[arg-type]
    assert unused == {"detection.score_threshold": "task is classification"}
