"""The recipe section `detection`: default boxes, matching and post-processing, by default as in SSD-ResNet34."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reconv.recipe.units import Fraction, Listed, Positive, PositiveFloat, PositiveFraction, Section

Threshold = Annotated[float, Field(gt=0, lt=1)]
DetectionMetric = Literal["ap", "ap50", "voc07", "voc10"]


class AnchorConfig(Section):
    """The default boxes of each feature map, from the largest map to the smallest."""

    scales: Annotated[tuple[PositiveFloat, ...], Listed] = (0.07, 0.15, 0.33, 0.51, 0.69, 0.87, 1.05)
    """Side of the square box of each map as a fraction of the input, and one more: a map also has a square whose side
    is the geometric mean of its scale and the next."""
    aspect_ratios: Annotated[tuple[Annotated[tuple[PositiveFloat, ...], Listed], ...], Listed] = (
        (2.0,),
        (2.0, 3.0),
        (2.0, 3.0),
        (2.0, 3.0),
        (2.0,),
        (2.0,),
    )
    """Width / height of the other boxes of each map; each ratio is also used inverted."""
    variances: Annotated[tuple[PositiveFloat, PositiveFloat], Listed] = (0.1, 0.2)
    """Scaling of the box deltas: of centers and of sizes."""

    @property
    def per_cell(self) -> tuple[int, ...]:
        """Number of default boxes per cell, for each map."""
        return tuple(2 + 2 * len(ratios) for ratios in self.aspect_ratios)


class DetectionConfig(Section):
    """Matching, losses and post-processing of a detector, for `task: detection`."""

    anchors: AnchorConfig = AnchorConfig()
    max_gt_boxes: Positive = 200
    """Most ground-truth boxes per training image; further boxes are left out and counted."""
    match_iou: Threshold = 0.5
    """Default boxes with at least this IoU are positive; so is the best default box of each ground-truth box."""
    negative_ratio: PositiveFloat = 3.0
    """Number of hard negatives per positive in the classification loss."""
    score_threshold: Fraction = 0.05
    """Detections need a score above this."""
    nms_iou: PositiveFraction = 0.5
    """Non-maximum suppression drops a detection that overlaps a better one of its class by this IoU or more."""
    topk_candidates: Positive = 200
    """Detections per class that enter non-maximum suppression."""
    detections_per_image: Positive = 200
    """Most detections per image after non-maximum suppression."""
    metric: DetectionMetric = "ap"
    """Metric that decides which checkpoint is best."""
