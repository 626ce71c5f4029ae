"""Optimizers, decay groups and weight averages; schedules and loops are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from reconv.optim.decay import DecayGroups, decay_groups
from reconv.optim.ema import Ema
from reconv.optim.sgd import SGD

if TYPE_CHECKING:
    from reconv.recipe import schema

__all__ = ["SGD", "DecayGroups", "Ema", "build_optimizer", "decay_groups"]


def build_optimizer(section: schema.Optimizer, model: nn.Module) -> SGD:
    """The optimizer a recipe names, over the network's trainable parameters."""
    return SGD(
        decay_groups(model, section.decay),
        momentum=section.momentum,
        nesterov=section.nesterov,
        weight_decay=section.weight_decay,
        path="fused",
    )
