"""Optimizers, decay groups and weight averages; schedules and loops are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from reconv.optim.decay import DecayGroups, decay_groups, norm_biases
from reconv.optim.ema import Ema
from reconv.optim.lars import LARS
from reconv.optim.rmsprop import RMSprop
from reconv.optim.sgd import SGD, Path

if TYPE_CHECKING:
    from reconv.recipe import schema

__all__ = ["LARS", "SGD", "DecayGroups", "Ema", "RMSprop", "build_optimizer", "decay_groups", "norm_biases"]

_SKIPPED = {"none": "all", "norm": "not-norm", "norm-bias": "not-norm-bias"}  # what is left to decay


def build_optimizer(section: schema.Optimizer, model: nn.Module, *, alpha: float | None = None) -> SGD | LARS | RMSprop:
    """The optimizer a recipe names, over the network's trainable parameters; `alpha` is the plan's."""
    if section.kind == "sgd":
        return SGD(
            decay_groups(model, section.decay),
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            path=_path(section.path),
            rates={} if section.norm_bias_lr == 1 else dict.fromkeys(norm_biases(model), section.norm_bias_lr),
        )
    if section.kind == "lars":
        return LARS(
            decay_groups(model, _SKIPPED[section.skip]),
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            trust=section.trust,
            epsilon=section.used_epsilon,
            path=_path(section.path),
        )
    return RMSprop(
        decay_groups(model, section.decay),
        form="tensorflow" if section.kind == "rmsprop-tf" else "torch",
        alpha=section.alpha if alpha is None else alpha,
        epsilon=section.used_epsilon,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
    )


def _path(wish: str) -> Path:
    """The fused kernel unless foreach was asked for; torch has it on every device that is served here."""
    return "foreach" if wish == "foreach" else "fused"
