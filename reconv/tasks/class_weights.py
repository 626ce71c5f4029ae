"""Weights of classes that make up for their different numbers of samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def balanced_class_weights(targets: npt.NDArray[np.int64], num_classes: int) -> tuple[float, ...]:
    """n / (k x count) for each class, as scikit-learn's `class_weight="balanced"`.

    n is the number of samples and k the number of classes that have some; a class without samples gets 1.
    """
    counts = np.bincount(targets, minlength=num_classes)
    num_present = np.count_nonzero(counts)
    return tuple(len(targets) / (num_present * count) if count else 1.0 for count in counts.tolist())
