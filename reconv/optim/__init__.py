"""Optimizers, decay groups and weight averages; schedules and loops are elsewhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from reconv.optim.decay import DecayGroups, decay_groups, norm_biases
from reconv.optim.ema import Ema
from reconv.optim.lars import LARS
from reconv.optim.rmsprop import RMSprop
from reconv.optim.rounding import HalfWeights, Rounding, widened
from reconv.optim.sgd import SGD, Path

if TYPE_CHECKING:
    from reconv.recipe import schema

__all__ = [
    "LARS",
    "SGD",
    "DecayGroups",
    "Ema",
    "HalfWeights",
    "RMSprop",
    "Rounding",
    "build_optimizer",
    "decay_groups",
    "norm_biases",
]

_SKIPPED = {"none": "all", "norm": "not-norm", "norm-bias": "not-norm-bias"}  # what is left to decay


def build_optimizer(
    section: schema.Optimizer, model: nn.Module, *, alpha: float | None = None, rounding: Rounding | None = None
) -> SGD | LARS | RMSprop | HalfWeights:
    """The optimizer a recipe names, over the network's trainable parameters.

    `alpha` is the plan's; `rounding` is for parameters in half precision.
    """
    groups = decay_groups(model, _SKIPPED[section.skip] if section.kind == "lars" else section.decay)
    if rounding is None:
        return _build(section, groups, model, alpha)
    wide = widened(groups)
    return HalfWeights(groups, wide, _build(section, wide, model, alpha), rounding)


def _build(
    section: schema.Optimizer, groups: DecayGroups, model: nn.Module, alpha: float | None
) -> SGD | LARS | RMSprop:
    if section.kind == "sgd":
        return SGD(
            groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            path=_path(section.path),
            rates={} if section.norm_bias_lr == 1 else dict.fromkeys(norm_biases(model), section.norm_bias_lr),
        )
    if section.kind == "lars":
        return LARS(
            groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            trust=section.trust,
            epsilon=section.used_epsilon,
            path=_path(section.path),
        )
    return RMSprop(
        groups,
        form="tensorflow" if section.kind == "rmsprop-tf" else "torch",
        alpha=section.alpha if alpha is None else alpha,
        epsilon=section.used_epsilon,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
    )


def _path(wish: str) -> Path:
    """The fused kernel unless foreach was asked for; torch has it on every device that is served here."""
    return "foreach" if wish == "foreach" else "fused"
