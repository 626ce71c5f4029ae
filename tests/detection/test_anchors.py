"""SSD anchors equal those of the published formulas, in NVIDIA's order."""

from __future__ import annotations

import math

import torch

from reconv.detection.anchors import generate_anchors
from reconv.detection.box_ops import cxcywh_to_xyxy

GRID_SIZES = (38, 19, 10, 5, 3, 1)
STRIDES_PX = (8, 16, 32, 64, 100, 300)
SCALES_PX = (21, 45, 99, 153, 207, 261, 315)
RATIOS = ((2,), (2, 3), (2, 3), (2, 3), (2,), (2,))


def anchors_by_formula() -> torch.Tensor:
    anchors = []
    for k, grid_size in enumerate(GRID_SIZES):
        s, s_next = SCALES_PX[k] / 300, SCALES_PX[k + 1] / 300
        sizes = [(s, s), (math.sqrt(s * s_next),) * 2]
        for a in RATIOS[k]:
            sizes += [(s * math.sqrt(a), s / math.sqrt(a)), (s / math.sqrt(a), s * math.sqrt(a))]
        for w, h in sizes:
            for i in range(grid_size):
                for j in range(grid_size):
                    f = 300 / STRIDES_PX[k]
                    anchor = ((j + 0.5) / f, (i + 0.5) / f, w, h)
                    anchors.append([min(max(v, 0.0), 1.0) for v in anchor])
    return torch.tensor(anchors, dtype=torch.float64)


def test_ssd300_has_8732_anchors_in_the_published_order() -> None:
    strides = [stride / 300 for stride in STRIDES_PX]
    anchors = generate_anchors(strides, GRID_SIZES, [0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05], RATIOS)
    assert anchors.shape == (8732, 4)
    torch.testing.assert_close(anchors.double(), anchors_by_formula(), rtol=0, atol=1e-7)


def test_centers_and_sizes_are_clipped_but_corners_are_not() -> None:
    anchors = generate_anchors([0.6], [2], [0.9, 1.3], [(4.0,)])
    assert anchors.min() >= 0 and anchors.max() == 1  # 0.9 * 2 exceeds the input
    assert cxcywh_to_xyxy(anchors).min() < 0
