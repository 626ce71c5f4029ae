"""The section about detection: default boxes, matching, losses and what is kept of a network's answers.

Owns names, types, ranges and defaults, which are those of the published SSD-ResNet34. Refuses to know tensors.
Invariant: as every section, valid and frozen.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reconv.recipe.section import Fraction, Listed, Positive, PositiveFloat, PositiveFraction, Section

Threshold = Annotated[float, Field(gt=0, lt=1)]
DetectionMetric = Literal["ap", "ap50", "voc07", "voc10"]


class AnchorConfig(Section):
    """The default boxes, a list of shapes for each map of the network, from the largest map to the smallest."""

    # Sides as shares of the input's, one for each map and one more: a map has its own square and one of the geometric
    # mean with the next.
    scales: Annotated[tuple[PositiveFloat, ...], Listed] = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)
    aspect_ratios: Annotated[tuple[Annotated[tuple[PositiveFloat, ...], Listed], ...], Listed] = (
        (2.0,),
        (2.0, 3.0),
        (2.0, 3.0),
        (2.0, 3.0),
        (2.0,),
        (2.0,),
    )  # width to height, each also lying
    variances: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.1, 0.2)  # of centres, of sizes

    @property
    def per_cell(self) -> tuple[int, ...]:
        """How many default boxes each cell of each map has."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)


class DetectionConfig(Section):
    """How boxes are matched, learned, found and scored. For task: detection."""

    anchors: AnchorConfig = AnchorConfig()
    max_gt_boxes: Positive = 200  # of one image in a batch; those beyond are left out and counted
    match_iou: Threshold = (
        0.5  # a default box is positive from this overlap on; each true box claims its best one anyway
    )
    negative_ratio: PositiveFloat = 3.0  # the hardest so many for each positive have a class loss
    score_threshold: Fraction = 0.05  # detections must be above
    nms_iou: PositiveFraction = 0.5  # of a class, those that overlap a better one by this much are dropped
    topk_candidates: Positive = 200  # before suppression
    detections_per_image: Positive = 200
    metric: DetectionMetric = "ap"  # which of the evaluation's numbers decides what is best
