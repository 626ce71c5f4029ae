"""Binary cross-entropy over classes, for one label per image as in timm's `BinaryCrossEntropy`, or for several."""

from __future__ import annotations

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class BinaryCrossEntropy:
    """The binary cross-entropy of each class, averaged or summed over classes and summed over samples."""

    target_threshold: float | None = None  # targets above it become 1, the others 0
    sum_classes: bool = False
    pos_weight: Tensor | None = None  # [num_classes]: factor of the positive part of the loss

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits [n, num_classes] and targets [n, num_classes] between 0 and 1, already smoothed."""
        targets = targets.to(logits.dtype)
        if self.target_threshold is not None:
            targets = (targets > self.target_threshold).to(logits.dtype)
        pos_weight = None if self.pos_weight is None else self.pos_weight.to(logits.dtype)
        total = F.binary_cross_entropy_with_logits(logits, targets, pos_weight=pos_weight, reduction="sum")
        return total if self.sum_classes else total / logits.shape[1]
