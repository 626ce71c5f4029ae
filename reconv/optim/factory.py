"""Builds the optimizer that a recipe asks for."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING

from torch import nn

from reconv.models.frozen import head_parameters
from reconv.models.layer_groups import layer_groups
from reconv.optim.adamw import AdamW
from reconv.optim.clip_grad import ClipGrad
from reconv.optim.lamb import LAMB
from reconv.optim.lars import LARS
from reconv.optim.optimizer import BaseOptimizer, OptimizerSetup
from reconv.optim.param_groups import DecayGroups, RateScale, decay_groups, norm_biases
from reconv.optim.rmsprop import RMSprop
from reconv.optim.sgd import SGD
from reconv.optim.stochastic_rounding import HalfPrecisionOptimizer, Rounding, float32_groups
from reconv.optim.vendor_sgd import SGDClass

if TYPE_CHECKING:
    from reconv.recipe.parts.optimizer import OptimizerConfig

LOSS_PREFIX = "loss:"
OPTIMIZERS: Mapping[str, type[BaseOptimizer]] = {  # by optimizer.name of the recipe
    "sgd": SGD,
    "lars": LARS,
    "rmsprop": RMSprop,
    "rmsprop-tf": RMSprop,
    "adamw": AdamW,
    "lamb": LAMB,
}


def optimizer_groups(section: OptimizerConfig, model: nn.Module, loss: nn.Module | None = None) -> DecayGroups:
    """The trainable parameters in the decay groups of a recipe's optimizer.

    Those of a loss are called `loss:NAME`. Its scalars and vectors, such as temperatures, are not decayed.
    """
    groups = decay_groups(model, section.lars_exclude if section.name == "lars" else section.weight_decay_exclude)
    for name, parameter in loss.named_parameters() if loss is not None else ():
        if parameter.requires_grad:
            group = groups.decay if parameter.ndim > 1 else groups.no_decay
            group[f"{LOSS_PREFIX}{name}"] = parameter
    return groups


def build_clip_grad(section: OptimizerConfig, model: nn.Module) -> ClipGrad | None:
    """The gradient clipping of a recipe; None: there is none."""
    value = section.effective_clip_grad
    if value is None:
        return None
    return ClipGrad(section.clip_mode, value, frozenset(head_parameters(model)))


def build_optimizer(
    section: OptimizerConfig,
    model: nn.Module,
    *,
    alpha: float | None = None,
    rounding: Rounding | None = None,
    sgd: str | SGDClass = "fused",
    only: Collection[str] | None = None,
    loss: nn.Module | None = None,
) -> BaseOptimizer | HalfPrecisionOptimizer:
    """The optimizer of a recipe, over the trainable parameters of a model.

    `alpha` is RMSprop's from the plan; `rounding` is for parameters in half precision; `sgd` is the device's fastest
    implementation ("fused", which AdamW can be, too, "foreach", or a vendor's class); `only` names the parameters of a
    shard; `loss` has parameters that are trained with the model.
    """
    groups = optimizer_groups(section, model, loss)
    if only is not None:
        groups = groups.subset(only)
    float32 = groups if rounding is None else float32_groups(groups)
    setup = OptimizerSetup(section, float32, rate_scales(section, model), alpha, sgd)
    optimizer = OPTIMIZERS[section.name].from_recipe(setup)
    return optimizer if rounding is None else HalfPrecisionOptimizer(groups, float32, optimizer, rounding)


def rate_scales(section: OptimizerConfig, model: nn.Module) -> dict[str, RateScale]:
    """The rates of the parameters relative to those of the recipe; empty if all are the same.

    The learning rate of norm biases is scaled at a constant learning rate x weight decay. The other scales, as in timm,
    leave the weight decay as it is.
    """
    if section.layer_decay == section.backbone_lr_scale == section.norm_bias_lr_scale == 1:
        return {}
    layers = reversed(layer_groups(model))
    from_last = {name: number for number, names in enumerate(layers) for name in names}
    head, biases = set(head_parameters(model)), set(norm_biases(model))
    scales = {}
    for name, _ in model.named_parameters():
        bias_scale = section.norm_bias_lr_scale if name in biases else 1.0
        lr = section.layer_decay ** from_last.get(name, 0) * (1.0 if name in head else section.backbone_lr_scale)
        scales[name] = RateScale(lr * bias_scale, bias_scale)
    return scales


def describe_rate_scales(scales: Mapping[str, RateScale]) -> str:
    """The range of the learning rates, as `learning rates: x 0.1 (conv1.weight) to x 1 (fc.weight)`."""
    lowest, highest = min(scales, key=lambda name: scales[name].lr), max(scales, key=lambda name: scales[name].lr)
    return f"learning rates: x {scales[lowest].lr:.3g} ({lowest}) to x {scales[highest].lr:.3g} ({highest})"
