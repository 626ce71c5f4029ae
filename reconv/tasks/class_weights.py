"""Weights of classes that make up for their different numbers of samples."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]


def balanced_class_weights(targets: I64, num_classes: int) -> tuple[float, ...]:
    """n / (k x count) for each class, as scikit-learn's `class_weight="balanced"`.

    n is the number of samples and k the number of classes that have some; a class without samples gets 1.
    """
    counts = np.bincount(targets, minlength=num_classes)
    num_present = np.count_nonzero(counts)
    return tuple(len(targets) / (num_present * count) if count else 1.0 for count in counts.tolist())


def balanced_pos_weights(targets: I64, num_classes: int) -> tuple[float, ...]:
    """Negatives / positives of each class, the usual `pos_weight` of torch's `BCEWithLogitsLoss`.

    `targets` are class indices [n] or multi-hot rows [n, num_classes]; a class without samples, or with all, gets 1.
    """
    counts = targets.sum(axis=0) if targets.ndim == 2 else np.bincount(targets, minlength=num_classes)
    return tuple((len(targets) - count) / count if 0 < count < len(targets) else 1.0 for count in counts.tolist())
