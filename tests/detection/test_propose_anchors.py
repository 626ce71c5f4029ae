"""Anchors proposed for boxes: they fit the boxes, increase, and depend on nothing else."""

from __future__ import annotations

import numpy as np
import pytest

from reconv.detection.propose_anchors import mean_best_iou, propose_anchors
from reconv.recipe.parts.detection import AnchorConfig
from reconv.recipe.schema import Recipe

DEFAULT = AnchorConfig()
PER_MAP = [len(ratios) for ratios in DEFAULT.aspect_ratios]


def boxes(count: int, center: float, spread: float, ratio: float, seed: int = 0) -> np.ndarray:
    draw = np.random.default_rng(seed)
    scale = center * np.exp(spread * draw.standard_normal(count))
    side = np.sqrt(ratio * np.exp(0.1 * draw.standard_normal(count)))
    return np.clip(np.stack([scale * side, scale / side], axis=1), 0.01, 1.0)


@pytest.mark.parametrize(("center", "spread", "ratio"), [(0.05, 0.4, 1.0), (0.2, 0.3, 4.0), (0.5, 0.2, 0.4)])
def test_proposed_anchors_fit_unusual_boxes_better_than_the_default_ones(center, spread, ratio) -> None:
    sizes = boxes(500, center, spread, ratio)
    scales, ratios = propose_anchors(sizes, PER_MAP)
    assert mean_best_iou(sizes, scales, ratios) > mean_best_iou(sizes, DEFAULT.scales, DEFAULT.aspect_ratios) + 0.03


@pytest.mark.parametrize(
    "sizes",
    [
        boxes(500, 0.2, 0.8, 1.5),
        np.full((7, 2), 0.3),
        np.full((3, 2), 1.0),
        np.full((3, 2), 0.001),
        np.array([[0.5, 0.25]]),
    ],
)
def test_any_boxes_give_anchors_that_a_recipe_accepts(sizes: np.ndarray) -> None:
    scales, ratios = propose_anchors(sizes, PER_MAP)
    anchors = {"scales": list(scales), "aspect_ratios": [list(own) for own in ratios]}
    recipe = Recipe.model_validate({"detection": {"anchors": anchors}})
    assert len(recipe.detection.anchors.scales) == len(PER_MAP) + 1


def test_the_order_of_the_boxes_does_not_matter() -> None:
    sizes = boxes(300, 0.2, 0.8, 1.5)
    assert propose_anchors(sizes, PER_MAP) == propose_anchors(sizes[::-1].copy(), PER_MAP)


def test_iou_is_that_of_boxes_at_the_same_center() -> None:
    sizes = np.array([[0.2, 0.2], [0.4, 0.1]])
    assert mean_best_iou(sizes, [0.2, 0.2 + 1e-9], [[]]) == pytest.approx((1 + 0.02 / 0.06) / 2)
