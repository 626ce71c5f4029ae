"""Learning from a teacher: its softened answers beside the labels (Hinton et al., 2015).

Owns the loss between two sets of logits. Refuses to know where the teacher comes from. Invariant: sums over samples,
and nothing of the teacher is differentiated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Teacher:
    """A network that is asked what it makes of the images the student sees."""

    answer: Callable[[Tensor], Tensor]  # images [n, c, h, w] to logits [n, classes]
    alpha: float  # the teacher's share in the loss; the labels have the rest
    temperature: float

    def blend(self, loss: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """(1 - alpha) x loss + alpha x T^2 x the sum of KL(teacher || student), both softened by T.

        T^2 keeps the size of the gradients, which softening by T divides by about that.
        """
        with torch.no_grad():
            answers = self.answer(images).to(logits.dtype)
        divergence = F.kl_div(
            F.log_softmax(logits / self.temperature, dim=1),
            F.log_softmax(answers / self.temperature, dim=1),
            reduction="sum",
            log_target=True,
        )
        return (1 - self.alpha) * loss + self.alpha * self.temperature**2 * divergence
