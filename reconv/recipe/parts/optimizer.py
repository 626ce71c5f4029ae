"""The recipe section `optimizer`: the update of the weights, gradient clipping and learning rates of single layers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from reconv.recipe.parts.contradiction import Contradiction
from reconv.recipe.units import Listed, NonNegative, Off, PositiveFloat, PositiveFraction, Section

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(Section):
    """The optimizer. `rmsprop` is torch's formula, `rmsprop-tf` TensorFlow's."""

    name: Literal["sgd", "lars", "rmsprop", "rmsprop-tf", "adamw", "lamb"] = "sgd"
    """Optimizer."""
    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Momentum factor of sgd, lars and rmsprop."""
    nesterov: bool = False
    """Use Nesterov momentum, for sgd and lars."""
    weight_decay: NonNegative = 1e-4
    """Weight decay: an L2 penalty, for adamw and lamb decoupled from the gradient's moments."""
    weight_decay_exclude: Literal["none", "norm-bias", "norm", "nvidia-by-name"] = "none"
    """Parameters without weight decay: norms and biases, norms, or those NVIDIA's code finds by the name `bn`."""
    alpha: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Smoothing constant of rmsprop's mean square."""
    alpha_exponent: Annotated[float, Field(ge=-64, lt=0)] | None = None
    """Set alpha by the batch size: alpha = 1 - global batch x 2^exponent."""
    betas: Annotated[tuple[Beta, Beta], Listed] = (0.9, 0.999)
    """AdamW and LAMB: smoothing constants of the gradient and of its square."""
    eps: NonNegative | Literal["auto"] = "auto"
    """Term added to the denominator; `auto` is 1e-3 for rmsprop, 0 for lars, 1e-8 for adamw and 1e-6 for lamb."""
    trust_coefficient: PositiveFloat = 0.001
    """LARS: a step is at most this fraction of the weight's norm."""
    lars_exclude: Literal["norm-bias", "norm", "none"] = "norm-bias"
    """LARS: parameters that take plain momentum steps without weight decay."""
    implementation: Literal["auto", "foreach", "fused"] = "auto"
    """Implementation of the same mathematics; `auto` uses torch's fused one where it exists."""
    clip_grad: PositiveFloat | Literal["auto"] | Off = "auto"
    """Gradient clipping: the largest norm or value, or AGC's factor; `auto` is off, and for lamb 1 (max_grad_norm)."""
    clip_mode: Literal["norm", "value", "agc"] = "norm"
    """Clip the norm of the whole gradient, each value, or adaptively each unit (AGC) by the norm of its weights."""
    layer_decay: PositiveFraction = 1
    """Layer-wise learning rate decay: each layer has this times the learning rate of the next; the last has it all."""
    backbone_lr_scale: PositiveFloat = 1
    """Factor of the learning rate of all parameters but the head's."""
    norm_bias_lr_scale: PositiveFloat = 1
    """SGD: factor of the learning rate of norm biases; their learning rate x weight decay stays the same."""

    @property
    def effective_clip_grad(self) -> float | None:
        """`clip_grad` with `auto` replaced by timm's default for the optimizer; None is off."""
        if isinstance(self.clip_grad, str):
            return 1.0 if self.clip_grad == "auto" and self.name == "lamb" else None
        return self.clip_grad

    @property
    def effective_eps(self) -> float:
        """`eps` with `auto` replaced by the vendors' default for the optimizer."""
        if self.eps != "auto":
            return self.eps
        return {"rmsprop": 1e-3, "rmsprop-tf": 1e-3, "adamw": 1e-8, "lamb": 1e-6}.get(self.name, 0.0)


def optimizer_rules(recipe: Recipe) -> Iterator[Contradiction]:
    optimizer = recipe.optimizer
    if optimizer.nesterov and optimizer.momentum == 0:
        yield Contradiction(("optimizer.nesterov", "optimizer.momentum"), "needs optimizer.momentum above 0")
    is_rmsprop, is_lars = optimizer.name.startswith("rmsprop"), optimizer.name == "lars"
    is_adam = optimizer.name in ("adamw", "lamb")
    given = {
        "nesterov": (optimizer.nesterov, optimizer.name in ("sgd", "lars"), "sgd and lars"),
        "betas": (optimizer.betas != (0.9, 0.999), is_adam, "adamw and lamb"),
        "alpha": (optimizer.alpha != 0.9, is_rmsprop, "rmsprop"),
        "alpha_exponent": (optimizer.alpha_exponent is not None, is_rmsprop, "rmsprop"),
        "eps": (optimizer.eps != "auto", optimizer.name != "sgd", "rmsprop, lars, adamw and lamb"),
        "trust_coefficient": (optimizer.trust_coefficient != 0.001, is_lars, "lars"),
        "lars_exclude": (optimizer.lars_exclude != "norm-bias", is_lars, "lars"),
        "implementation": (
            optimizer.implementation == "fused",
            optimizer.name in ("sgd", "lars", "adamw"),
            "sgd, lars and adamw when fused",
        ),
        "norm_bias_lr_scale": (optimizer.norm_bias_lr_scale != 1, optimizer.name == "sgd", "sgd"),
    }
    for name, (is_given, is_used, users) in given.items():
        if is_given and not is_used:
            text = f"is for {users}, but optimizer.name is {optimizer.name}"
            yield Contradiction((f"optimizer.{name}", "optimizer.name"), text)
    if optimizer.alpha_exponent is not None and optimizer.alpha != 0.9:
        text = "sets alpha, as optimizer.alpha does; remove one of them"
        yield Contradiction(("optimizer.alpha_exponent", "optimizer.alpha"), text)
    if optimizer.clip_grad == "auto" and optimizer.clip_mode != "norm":
        text = f"{optimizer.clip_mode} needs a number in optimizer.clip_grad, as in 0.01 for agc"
        yield Contradiction(("optimizer.clip_mode", "optimizer.clip_grad"), text)
    if is_lars and optimizer.weight_decay_exclude not in ("none", optimizer.lars_exclude):
        yield Contradiction(
            ("optimizer.weight_decay_exclude", "optimizer.lars_exclude"),
            f"{optimizer.weight_decay_exclude} differs from optimizer.lars_exclude ({optimizer.lars_exclude}), "
            "which lars does not decay; remove it",
            ("--set optimizer.weight_decay_exclude=none",),
        )
