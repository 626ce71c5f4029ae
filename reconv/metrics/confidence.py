"""Temperature scaling and split conformal prediction sets, fitted on the logits of validation images.

The temperature minimizes the cross-entropy (Guo et al. 2017). The threshold is that of the least ambiguous set-valued
classifier, LAC (Sadinle et al. 2019), on images that the temperature has not seen: of the right class's probabilities,
the one that a fraction `coverage` reaches, with the correction for a finite sample that makes the promise hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from reconv.core.confidence import ConfidenceCalibration
from reconv.core.random import key, permutation

MIN_IMAGES = 100  # to fit the temperature; the standard error of log T is a few percent
IMAGES_PER_MISS = 10  # prediction sets need this many images outside their promise: 100 of them at 90 %
MAX_LOGITS = 1 << 27  # of a validation set: half a GiB in fp32
_MAX_TEMPERATURE_IMAGES = 10_000
_NEWTON_STEPS = 30
_LOG_RANGE = 3.0  # 1/T is sought between exp(-3) and exp(3)


@dataclass(frozen=True, slots=True)
class FittedConfidence:
    """Calibration that was fitted, or None, and a sentence about it."""

    calibration: ConfidenceCalibration | None
    note: str


def fit_confidence(logits: Tensor, targets: Tensor, coverage: float) -> FittedConfidence:
    """Fit temperature and prediction sets on logits [n, classes] and class indices [n], in the order of the data.

    Half of the images, by a hash of their position, fit the temperature, the others the sets.
    """
    logits, targets = logits.detach().cpu().double(), targets.cpu().long()
    order = permutation(key(0, "confidence"), len(targets))
    first, second = (torch.from_numpy(np.sort(half)) for half in np.array_split(order, 2))
    needed = max(MIN_IMAGES, math.ceil(IMAGES_PER_MISS / (1 - coverage) - 1e-9))
    if len(first) < MIN_IMAGES:
        why = f"{len(targets):,} validation images, and {2 * MIN_IMAGES:,} are needed"
        return FittedConfidence(None, f"confidence is not calibrated: {why}")
    if not bool(logits.isfinite().all()):
        return FittedConfidence(None, "confidence is not calibrated: some logits are not finite")
    temperature = fit_temperature(logits[first], targets[first])
    calibration = ConfidenceCalibration(temperature, len(first))
    if len(second) < needed:
        why = f"{len(targets):,} validation images, and {2 * needed:,} are needed for {coverage:.4g}"
        return FittedConfidence(calibration, f"temperature {temperature:g}; no prediction sets: {why}")
    probabilities = (logits[second] / temperature).softmax(dim=1)
    threshold = lac_threshold(probabilities.gather(1, targets[second, None])[:, 0].numpy(), coverage)
    calibration = ConfidenceCalibration(temperature, len(first), coverage, threshold, len(second))
    sizes = (probabilities >= threshold).sum(dim=1)
    unsure = float((sizes != 1).double().mean())
    note = (
        f"confidence calibrated: temperature {temperature:g}; {100 * coverage:.4g} % prediction sets hold "
        f"{float(sizes.double().mean()):.3g} classes on average; {100 * unsure:.1f} % of the images are unsure"
    )
    return FittedConfidence(calibration, note)


def fit_temperature(logits: Tensor, targets: Tensor) -> float:
    """The temperature with the least cross-entropy, to four digits: the last ones depend on the machine.

    The cross-entropy is convex in b = 1/T; its derivative is the mean of E[z] - z_target, and the second one the mean
    variance of z, under softmax(b z). Newton's steps stay in an interval that contains the minimum.
    """
    stride = max(1, math.ceil(len(targets) / _MAX_TEMPERATURE_IMAGES))
    logits, targets = logits[::stride], targets[::stride]
    z = logits - logits.mean(dim=1, keepdim=True)
    right = z.gather(1, targets[:, None])[:, 0]
    low, high, b = math.exp(-_LOG_RANGE), math.exp(_LOG_RANGE), 1.0
    for _ in range(_NEWTON_STEPS):
        p = (b * z).softmax(dim=1)
        mean = (p * z).sum(dim=1)
        slope = float((mean - right).mean())
        curvature = float(((p * z * z).sum(dim=1) - mean * mean).mean())
        low, high = (low, b) if slope > 0 else (b, high)
        step = b - slope / curvature if curvature > 0 else high if slope < 0 else low
        following = step if low < step < high else math.sqrt(low * high)
        if abs(following - b) < 1e-7 * b:
            break
        b = following
    return float(f"{1 / b:.4g}")


def lac_threshold(right: npt.NDArray[np.float64], coverage: float) -> float:
    """The largest threshold that the probabilities [n] of the right classes reach with the promised coverage.

    Of an image to come, its probability is below the k-th smallest of n others with a chance of at most k / (n + 1).
    """
    k = math.floor((len(right) + 1) * (1 - coverage) + 1e-9)
    if k == 0:
        return 0.0
    return math.floor(float(np.partition(right, k - 1)[k - 1]) * 1e6) / 1e6


def prediction_sets(logits: Tensor, calibration: ConfidenceCalibration) -> Tensor:
    """Prediction sets as bool [n, classes]: True for the classes in the set of each image."""
    return (logits.double() / calibration.temperature).softmax(dim=1) >= calibration.threshold
