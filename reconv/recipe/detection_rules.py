"""What the detection section says about itself, and which fields of other sections detection has no use for.

Owns the rules about default boxes, losses and evaluation of detection. Refuses to know data and augmentation
(box_rules). Invariant: whatever detection would ignore in silence is a contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe


def detection_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every contradiction of a detection recipe apart from those about images."""
    yield from _boxes(recipe)
    if recipe.task != "detection":
        return
    excluded = {
        "loss.label_smoothing": recipe.loss.label_smoothing > 0,
        "loss.smooth_over": recipe.loss.smooth_over != "all-classes",
        "distill.teacher": recipe.distill.teacher is not None,
        "evaluate.tta": recipe.evaluate.tta != "none",
    }
    for field, is_given in excluded.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: classification")
    if recipe.augment.progressive_resizing or recipe.augment.size not in (None, recipe.data.preprocess.size):
        field = "augment.progressive_resizing" if recipe.augment.progressive_resizing else "augment.size"
        text = "detection trains on images of data.preprocess.size, which its default boxes are made for"
        yield Contradiction((field, "task"), text)
    yield from _promise(recipe)


def _promise(recipe: Recipe) -> Iterator[Contradiction]:
    expect, metric = recipe.expect, recipe.detection.metric
    if expect is not None and expect.metric != metric:
        text = f"{expect.metric} is promised, but detection.metric, which decides what is best, is {metric}"
        yield Contradiction(("expect.metric", "detection.metric"), text)


def _boxes(recipe: Recipe) -> Iterator[Contradiction]:
    scales, ratios = recipe.detection.anchors.scales, recipe.detection.anchors.aspect_ratios
    if not ratios:
        yield Contradiction(("detection.anchors.aspect_ratios",), "needs a list for each map, [] for squares alone")
    if len(scales) != len(ratios) + 1:
        yield Contradiction(
            ("detection.anchors.scales", "detection.anchors.aspect_ratios"),
            f"has {len(scales)} values, but the {len(ratios)} feature maps of detection.anchors.aspect_ratios need "
            f"{len(ratios) + 1}: one each and one more",
        )
    for before, after in pairwise(scales):
        if before >= after:
            yield Contradiction(("detection.anchors.scales",), f"must rise, but {after:g} follows {before:g}")
    if any(ratio == 1 for own in ratios for ratio in own):
        yield Contradiction(("detection.anchors.aspect_ratios",), "1 is a square, which every map has anyway")
