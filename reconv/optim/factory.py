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
from reconv.optim.optimizer import BaseOptimizer
from reconv.optim.param_groups import DecayGroups, RateScale, decay_groups, norm_biases
from reconv.optim.rmsprop import RMSprop
from reconv.optim.sgd import SGD, Implementation
from reconv.optim.stochastic_rounding import HalfPrecisionOptimizer, Rounding, float32_groups
from reconv.optim.vendor_sgd import SGDClass, VendorSGD

if TYPE_CHECKING:
    from reconv.recipe.parts.optimizer import OptimizerConfig

LOSS_PREFIX = "loss:"


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
    if rounding is None:
        return _build(section, groups, model, alpha, sgd)
    float32 = float32_groups(groups)
    return HalfPrecisionOptimizer(groups, float32, _build(section, float32, model, alpha, sgd), rounding)


def _build(
    section: OptimizerConfig,
    groups: DecayGroups,
    model: nn.Module,
    alpha: float | None,
    sgd: str | SGDClass,
) -> BaseOptimizer:
    scales = rate_scales(section, model)
    if section.name == "sgd":
        return SGD(
            groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            implementation=_implementation(section.implementation, sgd),
            rate_scales=scales,
        )
    if section.name == "lars":
        return LARS(
            groups,
            momentum=section.momentum,
            nesterov=section.nesterov,
            weight_decay=section.weight_decay,
            trust_coefficient=section.trust_coefficient,
            epsilon=section.effective_eps,
            # Its gradients are rescaled copies, and a vendor's optimizer would read those of the parameters.
            implementation=_implementation(section.implementation, sgd if isinstance(sgd, str) else "foreach"),
            rate_scales=scales,
        )
    if section.name == "adamw":
        return AdamW(
            groups,
            betas=section.betas,
            epsilon=section.effective_eps,
            weight_decay=section.weight_decay,
            implementation="fused" if section.implementation != "foreach" and sgd == "fused" else "foreach",
            rate_scales=scales,
        )
    if section.name == "lamb":
        return LAMB(
            groups,
            betas=section.betas,
            epsilon=section.effective_eps,
            weight_decay=section.weight_decay,
            rate_scales=scales,
        )
    return RMSprop(
        groups,
        form="tensorflow" if section.name == "rmsprop-tf" else "torch",
        alpha=section.alpha if alpha is None else alpha,
        epsilon=section.effective_eps,
        momentum=section.momentum,
        weight_decay=section.weight_decay,
        implementation="fused" if section.implementation == "auto" and _is_on_cuda(groups) else "foreach",
        rate_scales=scales,
    )


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


def _is_on_cuda(groups: DecayGroups) -> bool:
    return all(p.is_cuda for p in (*groups.decay.values(), *groups.no_decay.values()))


def _implementation(requested: str, sgd: str | SGDClass) -> Implementation:
    """Implementation that the recipe asks for, else the fastest on the device."""
    if requested == "foreach" or sgd == "foreach":
        return "foreach"
    return "fused" if isinstance(sgd, str) else VendorSGD(sgd)
