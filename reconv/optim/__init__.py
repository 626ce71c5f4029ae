"""Optimizers, decay groups and weight averages; schedules and loops are elsewhere."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, Literal

from torch import nn

from reconv.optim.ema import ModelEma
from reconv.optim.lars import LARS
from reconv.optim.param_groups import DecayGroups, decay_groups, norm_biases
from reconv.optim.rmsprop import RMSprop
from reconv.optim.sgd import SGD, Path
from reconv.optim.stochastic_rounding import HalfWeights, Rounding, widened
from reconv.optim.vendor import MakeSgd, VendorDescent

if TYPE_CHECKING:
    from reconv.recipe import schema

__all__ = [
    "LARS",
    "SGD",
    "DecayGroups",
    "HalfWeights",
    "ModelEma",
    "RMSprop",
    "Rounding",
    "build_optimizer",
    "decay_groups",
    "norm_biases",
    "optimizer_groups",
]


def optimizer_groups(section: schema.OptimizerConfig, model: nn.Module) -> DecayGroups:
    """The trainable parameters as the optimizer of a recipe sorts them."""
    return decay_groups(model, section.lars_exclude if section.name == "lars" else section.weight_decay_exclude)


def build_optimizer(
    section: schema.OptimizerConfig,
    model: nn.Module,
    *,
    alpha: float | None = None,
    rounding: Rounding | None = None,
    descent: Literal["fused", "foreach"] | MakeSgd = "fused",
    only: Collection[str] | None = None,
) -> SGD | LARS | RMSprop | HalfWeights:
    """The optimizer a recipe names, over the network's trainable parameters.

    `alpha` is the plan's; `rounding` is for parameters in half precision; `descent` is what the device does best;
    `only` names the parameters of a share.
    """
    groups = optimizer_groups(section, model)
    if only is not None:
        groups = groups.only(only)
    if rounding is None:
        return _build(section, groups, model, alpha, descent)
    wide = widened(groups)
    return HalfWeights(groups, wide, _build(section, wide, model, alpha, descent), rounding)


def _build(
    section: schema.OptimizerConfig,
    groups: DecayGroups,
    model: nn.Module,
    alpha: float | None,
    descent: Literal["fused", "foreach"] | MakeSgd,
) -> SGD | LARS | RMSprop:
    if section.name == "sgd":
        return SGD(
            groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            path=_path(section.implementation, descent),
            rates={}
            if section.norm_bias_lr_scale == 1
            else dict.fromkeys(norm_biases(model), section.norm_bias_lr_scale),
        )
    if section.name == "lars":
        return LARS(
            groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            trust=section.trust_coefficient,
            epsilon=section.effective_eps,
            # Its gradients are made on the way: a vendor's optimizer would read those of the parameters.
            path=_path(section.implementation, descent if isinstance(descent, str) else "foreach"),
        )
    return RMSprop(
        groups,
        form="tensorflow" if section.name == "rmsprop-tf" else "torch",
        alpha=section.alpha if alpha is None else alpha,
        epsilon=section.effective_eps,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        path="fused" if section.implementation == "auto" and _is_on_cuda(groups) else "foreach",
    )


def _is_on_cuda(groups: DecayGroups) -> bool:
    """Whether all parameters are where launches cost more than passes over memory."""
    return all(p.is_cuda for p in (*groups.decayed.values(), *groups.free.values()))


def _path(wish: str, descent: Literal["fused", "foreach"] | MakeSgd) -> Path:
    """What the device does best, unless the recipe says."""
    if wish == "foreach":
        return "foreach"
    return descent if isinstance(descent, str) else VendorDescent(descent)
