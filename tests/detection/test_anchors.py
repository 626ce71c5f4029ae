"""Default boxes are the published ones, in the published order."""

from __future__ import annotations

import math

import torch

from reconv.detection.anchors import default_boxes
from reconv.detection.box_ops import to_xyxy

SIDES = (38, 19, 10, 5, 3, 1)
STEPS_PX = (8, 16, 32, 64, 100, 300)
SCALES_PX = (21, 45, 99, 153, 207, 261, 315)
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))


def published() -> torch.Tensor:
    """The boxes by the published formulas, one at a time."""
    boxes = []
    for k, side in enumerate(SIDES):
        s, s_next = SCALES_PX[k] / 300, SCALES_PX[k + 1] / 300
        sizes = [(s, s), (math.sqrt(s * s_next),) * 2]
        for a in RATIOS[k]:
            sizes += [(s * math.sqrt(a), s / math.sqrt(a)), (s / math.sqrt(a), s * math.sqrt(a))]
        for w, h in sizes:
            for i in range(side):
                for j in range(side):
                    f = 300 / STEPS_PX[k]
                    box = ((j + 0.5) / f, (i + 0.5) / f, w, h)
                    boxes.append([min(max(v, 0.0), 1.0) for v in box])
    return torch.tensor(boxes, dtype=torch.float64)


def test_there_are_8732_default_boxes_in_the_published_order() -> None:
    boxes = default_boxes([step / 300 for step in STEPS_PX], SIDES, [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05], RATIOS)
    assert boxes.shape == (8732, 4)
    torch.testing.assert_close(boxes.double(), published(), rtol=0, atol=1e-7)


def test_centres_and_sizes_are_clipped_and_corners_are_not() -> None:
    boxes = default_boxes([0.6], [2], [0.9, 1.3], [(4.0,)])
    assert boxes.min() >= 0 and boxes.max() == 1  # 0.9 x 2 is wider than the image, 1.5 x 0.6 lies in it
    assert to_xyxy(boxes).min() < 0
