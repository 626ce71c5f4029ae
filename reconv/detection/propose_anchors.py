"""Anchors for the boxes of a dataset: k-means over their sizes and aspect ratios.

Nothing is random: the centers start at quantiles. Sizes are fractions of the image, as a detector sees them after its
resize to a square.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from reconv.detection.anchors import anchor_sizes

F64 = npt.NDArray[np.float64]

MIN_GROWTH = 1.15  # of the scale from one map to the next
MIN_RATIO = 1.2  # below, a box counts as square: every map has squares
SCALE_RANGE = (0.02, 0.9)  # of the first and the last map
MAX_NEXT_SCALE = 1.05  # of the scale after the last
_ITERATIONS = 50


def propose_anchors(
    sizes: F64, ratios_per_map: Sequence[int]
) -> tuple[tuple[float, ...], tuple[tuple[float, ...], ...]]:
    """Scales (one per map and one more) and aspect ratios (as many per map as given) for boxes [n, 2] (width, height).

    A map has the boxes of one cluster of sizes, from small to large, and the aspect ratios of those boxes.
    """
    sizes = np.clip(sizes, 1e-4, 1.0)
    logs = np.log(np.sqrt(sizes[:, 0] * sizes[:, 1]))
    centers = _kmeans(logs, len(ratios_per_map))
    scales = _increasing(np.exp(centers))
    owners = np.abs(logs[:, None] - np.log(scales)[None, :]).argmin(axis=1)
    folded = np.maximum(sizes[:, 0], sizes[:, 1]) / np.minimum(sizes[:, 0], sizes[:, 1])
    ratios = tuple(_ratios(folded[owners == level], folded, number) for level, number in enumerate(ratios_per_map))
    last = min(MAX_NEXT_SCALE, float(scales[-1] ** 2 / scales[-2])) if len(scales) > 1 else MAX_NEXT_SCALE
    following = max(last, float(scales[-1]) * MIN_GROWTH)
    return tuple(round(float(scale), 3) for scale in (*scales, following)), ratios


def mean_best_iou(sizes: F64, scales: Sequence[float], aspect_ratios: Sequence[Sequence[float]]) -> float:
    """The mean over boxes [n, 2] of the IoU with the best anchor at the same center."""
    anchors = np.array(
        [
            size
            for scale, following, ratios in zip(scales[:-1], scales[1:], aspect_ratios, strict=True)
            for size in anchor_sizes(scale, following, ratios)
        ]
    )
    overlap = np.minimum(sizes[:, None], np.minimum(anchors, 1.0)[None]).prod(axis=2)
    union = sizes.prod(axis=1)[:, None] + np.minimum(anchors, 1.0).prod(axis=1)[None] - overlap
    return float((overlap / union).max(axis=1).mean())


def _kmeans(values: F64, number: int) -> F64:
    """Centers of clusters of numbers, in order."""
    centers = np.quantile(values, (np.arange(number) + 0.5) / number)
    for _ in range(_ITERATIONS):
        owners = np.abs(values[:, None] - centers[None, :]).argmin(axis=1)
        found = [values[owners == k].mean() if (owners == k).any() else centers[k] for k in range(number)]
        if np.array_equal(found, centers):
            break
        centers = np.array(found)
    return np.sort(centers)


def _increasing(scales: F64) -> F64:
    """The scales in their range, each at least MIN_GROWTH times the one before."""
    smallest, largest = SCALE_RANGE
    number = len(scales)
    result = np.clip(scales, smallest, largest)
    for level in range(1, number):
        result[level] = max(result[level], result[level - 1] * MIN_GROWTH)
    for level in range(number - 1, -1, -1):  # what grew out of the range pushes the others down
        result[level] = min(result[level], largest / MIN_GROWTH ** (number - 1 - level))
    return result


def _ratios(own: F64, all_boxes: F64, number: int) -> tuple[float, ...]:
    """The aspect ratios of one map, without those of squares; of few boxes, those of all maps."""
    folded = own if (own >= MIN_RATIO).sum() >= 10 * number else all_boxes
    folded = folded[folded >= MIN_RATIO]
    if not len(folded):
        return tuple(2.0 + extra for extra in range(number))
    found = np.exp(_kmeans(np.log(np.minimum(folded, 10.0)), number)).round(1)
    return tuple(dict.fromkeys(float(max(ratio, MIN_RATIO)) for ratio in found))
