"""Your own loss: a function of logits and targets that returns one loss per sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from reconv.custom_code import build_object, code_errors
from reconv.errors import UsageError


@dataclass(frozen=True, slots=True)
class CustomLoss:
    """The sum of the user's losses of each sample, so that micro-batches and ranks give the same gradients."""

    name: str
    function: Callable[[Tensor, Tensor], Tensor]

    def __call__(self, logits: Tensor, targets: Tensor) -> Tensor:
        """The loss of logits [n, classes] and targets: class indices [n], or probabilities [n, classes]."""
        with code_errors(self.name):
            losses = self.function(logits, targets)
        if not isinstance(losses, Tensor) or losses.shape != (len(logits),):
            found = f"a tensor {list(losses.shape)}" if isinstance(losses, Tensor) else f"a {type(losses).__name__}"
            raise UsageError(
                f"{self.name} returns {found} for {len(logits)} samples",
                where="loss.name",
                why="the loss of every sample is needed: sums over micro-batches and processes are made from them",
                then="return one loss per sample [n], as with reduction='none'",
            )
        return losses.sum()


def build_custom_loss(name: str, options: Mapping[str, Any], device: torch.device) -> CustomLoss:
    """The loss that an import path names: a function, or a class that is called with the options."""
    function = build_object(name, options, "a loss")
    if isinstance(function, nn.Module):
        if next(function.parameters(), None) is not None:
            raise UsageError(
                f"{name} has parameters, which would not be trained",
                where="loss.name",
                then="put them into the network, or make them buffers",
            )
        function = function.to(device)
    if not callable(function):
        raise UsageError(f"{name} is not a loss", where="loss.name", why=f"it is {function!r}")
    return CustomLoss(name, function)
