"""Knowledge distillation: training on a teacher's softened logits and the labels (Hinton et al., 2015)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Teacher:
    """A trained model that gets the student's images; it receives no gradients."""

    forward: Callable[[Tensor], Tensor]  # images [n, c, h, w] to logits [n, num_classes]
    alpha: float  # the teacher's weight in the loss; the labels have 1 - alpha
    temperature: float

    def distillation_loss(self, loss: Tensor, logits: Tensor, images: Tensor) -> Tensor:
        """(1 - alpha) x loss + alpha x T^2 x the sum over samples of KL(teacher || student), both softened by T.

        Softening by T divides gradients by about T^2, which the factor restores.
        """
        with torch.no_grad():
            teacher_logits = self.forward(images).to(logits.dtype)
        divergence = F.kl_div(
            F.log_softmax(logits / self.temperature, dim=1),
            F.log_softmax(teacher_logits / self.temperature, dim=1),
            reduction="sum",
            log_target=True,
        )
        return (1 - self.alpha) * loss + self.alpha * self.temperature**2 * divergence
