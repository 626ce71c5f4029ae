"""Which default boxes have a class loss: the positive ones, and the negatives that look least like background.

Owns the choice. Refuses to know the loss itself. Invariant: an image with p positives has min(ratio x p, negatives)
negatives; without positives it has none; of equal losses the first counts.
"""

from __future__ import annotations

import torch
from torch import Tensor


def hard_negatives(losses: Tensor, positive: Tensor, ratio: float) -> Tensor:
    """The negatives [n, num_anchors] bool with the highest of `losses` [n, num_anchors], per image."""
    num_wanted = (positive.sum(dim=1, keepdim=True) * ratio).floor()
    # Positives sort behind every negative, whose losses are at least 0.
    order = losses.detach().masked_fill(positive, -1.0).argsort(dim=1, descending=True, stable=True)
    is_hard = torch.arange(losses.shape[1], device=losses.device) < num_wanted
    chosen = torch.zeros_like(positive).scatter(1, order, is_hard.expand_as(positive))
    return chosen & ~positive
