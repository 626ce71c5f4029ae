"""Weights of classes that make up for their different numbers of samples.

Class weights are float32 numbers that are added in float64, which is exact: their sum does not depend on how a batch
is split (tests/laws/test_law_losses.py).
"""

from __future__ import annotations

from collections.abc import Sequence


def balanced_class_weights(counts: Sequence[int]) -> tuple[float, ...]:
    """n / (k x count) for each class, as scikit-learn's `class_weight="balanced"`.

    n is the number of samples and k the number of classes that have some; a class without samples gets 1.
    """
    num_samples, num_present = sum(counts), sum(count > 0 for count in counts)
    return tuple(num_samples / (num_present * count) if count else 1.0 for count in counts)


def balanced_pos_weights(counts: Sequence[int], num_samples: int) -> tuple[float, ...]:
    """Negatives / positives of each class, the usual `pos_weight` of torch's `BCEWithLogitsLoss`.

    A class without samples, or with all of them, gets 1.
    """
    return tuple((num_samples - count) / count if 0 < count < num_samples else 1.0 for count in counts)
