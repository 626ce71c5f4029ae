"""The recipe sections `loss` and `distill`: the loss of classification, class weights and knowledge distillation."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from reconv.recipe.parts.code import ImportPath, Options
from reconv.recipe.units import Fraction, Listed, PositiveFloat, Section


class LossConfig(Section):
    """The loss of classification."""

    name: Literal["auto", "cross_entropy", "bce"] | ImportPath = "auto"
    """`bce` is the binary cross-entropy of each class, as timm's --bce-loss; `auto` uses it for task: multilabel. An
    import path as in my_pkg.losses:focal is your own: a function of logits and targets that returns the loss of each
    sample."""
    options: Options = Field(default_factory=dict)
    """Keyword arguments of your own loss."""
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0
    """Label smoothing in training."""
    smooth_over: Literal["all-classes", "other-classes"] = "all-classes"
    """Spread the smoothing over all classes, as torch does, or over all but the true one, which keeps
    1 - label_smoothing."""
    class_weights: Annotated[tuple[PositiveFloat, ...], Field(min_length=1), Listed] | Literal["none", "balanced"] = (
        "none"
    )
    """Weight of each class, as `weight` of torch's cross_entropy: one number per class in the order of the class names,
    or `balanced`, samples / (classes x samples of the class) in the training set, as in scikit-learn. With bce it is
    `pos_weight`, and `balanced` is negatives / positives."""
    bce_target_threshold: Annotated[float, Field(gt=0, lt=1)] | None = None
    """bce: targets above this become 1 and others 0, after smoothing and mixing; null leaves them as they are."""
    bce_sum: bool = False
    """bce: sum the loss over the classes instead of averaging it."""


class DistillConfig(Section):
    """Knowledge distillation: (1 - alpha) x loss + alpha x T^2 x KL divergence from the teacher."""

    teacher: str | None = None
    """Run or weights file of the teacher; null switches distillation off."""
    teacher_recipe: str | None = None
    """Recipe of a teacher that is given by a weights file."""
    alpha: Fraction = 0.5
    """Weight of the distillation loss."""
    temperature: PositiveFloat = 4
    """Temperature T of both softmaxes."""
