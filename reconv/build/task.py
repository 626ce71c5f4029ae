"""Tasks of a run, built from its recipe: classification, and detection with its anchors and post-processing.

Training, evaluation and prediction use the same anchors, which match the feature maps of the recipe's network.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch

from reconv.build.data import as_detection_dataset
from reconv.build.model import compile_for, uses_compile
from reconv.build.postprocess import build_anchors, build_postprocess_config
from reconv.core.errors import RecipeError, UsageError
from reconv.data.dataset import Dataset, class_counts
from reconv.device import Device
from reconv.metrics.coco_eval import require_coco_eval
from reconv.metrics.custom import check_metrics
from reconv.recipe.parts.code import names_code
from reconv.recipe.schema import Recipe
from reconv.tasks.binary_cross_entropy import BinaryCrossEntropy
from reconv.tasks.class_weights import balanced_class_weights, balanced_pos_weights
from reconv.tasks.classification import ClassificationTask
from reconv.tasks.custom_loss import CustomLoss, build_custom_loss, example_batch
from reconv.tasks.detection import DetectionTask, MatchConfig, ssd_losses
from reconv.tasks.distillation import Teacher
from reconv.tasks.multilabel import MultilabelTask

AnyTask = ClassificationTask | MultilabelTask | DetectionTask


def build_task(
    recipe: Recipe,
    dataset: Dataset,
    device: Device,
    teacher: Teacher | None = None,
    class_weights: Sequence[float] | None = None,
    custom_loss: CustomLoss | None = None,
) -> AnyTask:
    """The recipe's task; the validation set has its classes and, for detection, the boxes to evaluate against."""
    if recipe.task == "detection":
        return build_detection(recipe, dataset, device)
    loss = recipe.loss
    weights = None if class_weights is None else torch.tensor(class_weights, device=device.torch)
    bce = BinaryCrossEntropy(loss.bce_target_threshold, loss.bce_sum, weights) if uses_bce(recipe) else None
    if recipe.task == "multilabel":
        assert bce is not None
        metric = recipe.evaluate.best_metric or "map"
        return MultilabelTask(len(dataset.class_names), loss.label_smoothing, custom_loss or bce, metric)
    return ClassificationTask(
        len(dataset.class_names),
        loss.label_smoothing,
        loss.smooth_over,
        teacher=teacher,
        class_weights=weights if bce is None else None,
        bce=bce,
        mixes_targets=recipe.augment.mixes,
        metric=recipe.evaluate.best_metric or "top1",
        custom_metrics=recipe.metrics,
        custom_loss=custom_loss,
    )


def build_loss(recipe: Recipe, num_classes: int, device: Device) -> CustomLoss | None:
    """The custom loss of a recipe, for training; None if it names none. Called once with an example batch."""
    loss = recipe.loss
    if not names_code(loss.name):
        return None
    is_soft = loss.label_smoothing > 0 or recipe.augment.mixes
    kind: Literal["index", "probabilities", "labels"] = "probabilities" if is_soft else "index"
    example = example_batch(num_classes, "labels" if recipe.task == "multilabel" else kind)
    built = build_custom_loss(loss.name, loss.options, device.torch, example, recipe.seed)
    if built.module is not None and any(p.requires_grad for p in built.module.parameters()):
        _check_trained_loss(recipe)
    return built


def _check_trained_loss(recipe: Recipe) -> None:
    """Raise if the parameters of a loss cannot be trained with the settings of a recipe."""
    for field, is_set, text in (
        ("parallel.pipeline_stages", recipe.parallel.pipeline_stages > 1, "1"),
        ("precision.mode", recipe.precision.mode == "16.16", "16.32 or bf16"),
    ):
        if is_set:
            raise UsageError(
                f"{recipe.loss.name} has parameters, which cannot be trained with this {field}",
                where=field,
                hint=f"set {field} to {text}, or make them buffers",
            )


def uses_bce(recipe: Recipe) -> bool:
    """True if the loss is the binary cross-entropy, unless the user gives another."""
    return recipe.loss.name == "bce" or recipe.task == "multilabel"


def training_class_weights(recipe: Recipe, dataset: Dataset) -> tuple[float, ...] | None:
    """The weight of each class of a training set; None if all classes count the same."""
    given = recipe.loss.class_weights
    if given == "none":
        return None
    if given == "balanced":
        counts = class_counts(dataset)
        return balanced_pos_weights(counts, len(dataset)) if uses_bce(recipe) else balanced_class_weights(counts)
    check_class_weights(recipe, dataset)
    return given


def check_class_weights(recipe: Recipe, dataset: Dataset) -> None:
    """Refuse a list of class weights that does not have one number per class."""
    given, num_classes = recipe.loss.class_weights, len(dataset.class_names)
    if not isinstance(given, str) and len(given) != num_classes:
        raise RecipeError(
            f"loss.class_weights has {len(given)} numbers, but the data has {num_classes} classes",
            where="loss.class_weights",
            why=f"it needs one for each class, in this order: {', '.join(dataset.class_names[:10])}"
            + (", ..." if num_classes > 10 else ""),
            hint="give one number per class, or --set loss.class_weights=balanced",
        )


def describe_class_weights(weights: Sequence[float], class_names: Sequence[str]) -> str:
    """One line for the log: the weights of the classes, of many only the smallest and the largest."""
    pairs = list(zip(class_names, weights, strict=True))
    if len(pairs) > 10:
        ordered = sorted(pairs, key=lambda pair: pair[1])
        pairs = [ordered[0], ordered[-1]]
    listed = ", ".join(f"{name} {weight:.4g}" for name, weight in pairs)
    return f"class weights: {listed}" + (f" and {len(weights) - 2:,} between" if len(weights) > 10 else "")


def check_metric(recipe: Recipe) -> None:
    """Refuse metrics that cannot be computed: own ones that are none, and those whose packages are not installed."""
    check_metrics(recipe.metrics)
    is_evaluated = recipe.task == "detection" and recipe.evaluate.every != "off"
    if is_evaluated and recipe.detection.metric.startswith("ap"):
        require_coco_eval(f"detection.metric: {recipe.detection.metric}")


def build_detection(recipe: Recipe, dataset: Dataset, device: Device) -> DetectionTask:
    """The detection task, evaluated against the annotations of a validation set."""
    section = recipe.detection
    loss_fn = compile_for(ssd_losses, device) if uses_compile(recipe, device) else ssd_losses
    return DetectionTask(
        anchors_cxcywh=build_anchors(recipe).to(device.torch),
        match_config=MatchConfig(section.anchors.variances, section.match_iou, section.negative_ratio),
        postprocess_config=build_postprocess_config(recipe),
        class_names=tuple(dataset.class_names),
        truth=as_detection_dataset(dataset).annotation,
        metric=section.metric,
        loss_fn=loss_fn,
    )
