"""Rules between the task, the model, the metrics and what they need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import TYPE_CHECKING

from reconv.recipe.parts.code import names_code
from reconv.recipe.rules.contradiction import Contradiction, join_words

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

BOX_SOURCES = ("auto", "coco", "voc", "yolo", "tfrecord", "scattered-digits", "synthetic", "synthetic-device")
MULTILABEL_SOURCES = ("auto", "csv", "synthetic", "synthetic-device")
_BOXES_ONLY = ("coco", "voc", "yolo", "scattered-digits")
_METRICS = {
    "classification": ("top1", "top5", "loss"),
    "multilabel": ("map", "micro_f1", "macro_f1", "loss"),
    "detection": (
        *("ap", "ap50", "ap75", "ap_small", "ap_medium", "ap_large"),
        *("ar1", "ar10", "ar100", "ar_small", "ar_medium", "ar_large"),
        *("voc07", "voc10"),
    ),
}


def model_rules(recipe: Recipe) -> Iterator[Contradiction]:
    model, distill = recipe.model, recipe.distill
    has_weights = model.init is not None or model.resume_from is not None
    if model.freeze_backbone and not has_weights:
        text = "would train a head on a random backbone; set model.init"
        yield Contradiction(("model.freeze_backbone", "model.init"), text)
    if model.init is not None and model.resume_from is not None:
        text = "has the weights, too; set one of them"
        yield Contradiction(("model.resume_from", "model.init"), text)
    if model.trainable and not has_weights:
        text = "would leave the other weights random; set model.init"
        yield Contradiction(("model.trainable", "model.init"), text)
    if model.freeze_until != "off" and not has_weights:
        text = "would train a head on a random backbone; set model.init"
        yield Contradiction(("model.freeze_until", "model.init"), text)
    for other, is_given in (("freeze_backbone", model.freeze_backbone), ("trainable", bool(model.trainable))):
        if model.freeze_until != "off" and is_given:
            text = f"trains all parameters later, but model.{other} never does; set one of them"
            yield Contradiction(("model.freeze_until", f"model.{other}"), text)
    if model.trainable and model.freeze_backbone:
        text = "trains only the head, but model.trainable names parameters; set one of them"
        yield Contradiction(("model.freeze_backbone", "model.trainable"), text)
    loss = recipe.loss
    for name, is_given in (("bce_target_threshold", loss.bce_target_threshold is not None), ("bce_sum", loss.bce_sum)):
        if is_given and loss.name != "bce" and recipe.task == "classification":
            yield Contradiction((f"loss.{name}", "loss.name"), f"is for bce, but loss.name is {loss.name}")
    if loss.options and not names_code(loss.name):
        text = f"is for a custom loss, by import path, but loss.name is {loss.name}"
        yield Contradiction(("loss.options", "loss.name"), text)
    if names_code(loss.name) and loss.class_weights != "none":
        text = "is for cross_entropy and bce; a custom loss weighs its samples itself"
        yield Contradiction(("loss.class_weights", "loss.name"), text)
    if distill.teacher is not None and loss.name in ("auto", "cross_entropy") and loss.class_weights != "none":
        text = "divides the loss by the weights of the samples, which the loss of distill.teacher does not have"
        yield Contradiction(("loss.class_weights", "distill.teacher"), text)
    if distill.teacher_recipe is not None and distill.teacher is None:
        text = "is the recipe of a teacher, but distill.teacher is not set"
        yield Contradiction(("distill.teacher_recipe", "distill.teacher"), text)


def task_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Contradictions: settings that one task would ignore without notice."""
    if recipe.task == "detection":
        yield from _detection(recipe)
        return
    detection_only = {
        "data.source": recipe.data.source in _BOXES_ONLY,
        "augment.crop": recipe.augment.crop == "ssd",
        "augment.zoom_out.probability": recipe.augment.zoom_out.probability > 0,
    }
    for field, is_given in detection_only.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: detection")
    if recipe.task == "multilabel":
        yield from _multilabel(recipe)


def _multilabel(recipe: Recipe) -> Iterator[Contradiction]:
    if recipe.data.source not in MULTILABEL_SOURCES:
        text = f"{recipe.data.source} has one label per image; use one of {', '.join(MULTILABEL_SOURCES)}"
        yield Contradiction(("data.source", "task"), text)
    one_class_only = {
        "data.sampler": recipe.data.sampler != "random",
        "data.background_class": recipe.data.background_class,
        "loss.name": recipe.loss.name == "cross_entropy",
        "loss.smooth_over": recipe.loss.smooth_over != "all-classes",
        "distill.teacher": recipe.distill.teacher is not None,
        "metrics": bool(recipe.metrics),
    }
    for field, is_given in one_class_only.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: classification, with one class per image")


def _detection(recipe: Recipe) -> Iterator[Contradiction]:
    data, augment, expect = recipe.data, recipe.augment, recipe.expect
    if data.source not in BOX_SOURCES:
        yield Contradiction(("data.source", "task"), f"{data.source} has no boxes; use one of {', '.join(BOX_SOURCES)}")
    if data.preprocess.resize is not None:
        text = "must be null for task: detection, which uses whole images instead of center crops"
        yield Contradiction(("data.preprocess.resize", "task"), text)
    if data.background_class:
        yield Contradiction(("data.background_class", "task"), "is for task: classification; detection always has one")
    classification_only = {
        "data.preload": data.preload == "device",
        "data.sampler": data.sampler != "random",
        "augment.auto_augment": augment.auto_augment != "none",
        "augment.random_erasing.probability": augment.random_erasing.probability > 0,
        "augment.mixup.alpha": augment.mixup.enabled,
        "augment.cutmix.alpha": augment.cutmix.enabled,
        "augment.extra": bool(augment.extra),
        "metrics": bool(recipe.metrics),
        "loss.label_smoothing": recipe.loss.label_smoothing > 0,
        "loss.smooth_over": recipe.loss.smooth_over != "all-classes",
        "loss.name": recipe.loss.name == "bce",
        "loss.class_weights": recipe.loss.class_weights != "none",
        "distill.teacher": recipe.distill.teacher is not None,
        "evaluate.tta": recipe.evaluate.tta != "none",
    }
    for field, is_given in classification_only.items():
        if is_given:
            yield Contradiction((field, "task"), "is for task: classification")
    if augment.crop not in ("none", "ssd"):
        yield Contradiction(("augment.crop", "task"), f"{augment.crop} does not support boxes; use none or ssd")
    if augment.color_jitter.enabled and augment.color_jitter.implementation != "tensorflow":
        yield Contradiction(("augment.color_jitter.implementation", "task"), "must be tensorflow for task: detection")
    if augment.progressive_resizing or augment.size not in (None, data.preprocess.size):
        field = "augment.progressive_resizing" if augment.progressive_resizing else "augment.size"
        text = "is not supported for task: detection: the default boxes are made for data.preprocess.size"
        yield Contradiction((field, "task"), text)
    if expect is not None and expect.metric != recipe.detection.metric:
        text = f"{expect.metric} differs from detection.metric {recipe.detection.metric}, which decides what is best"
        yield Contradiction(("expect.metric", "detection.metric"), text)


def anchors_rules(recipe: Recipe) -> Iterator[Contradiction]:
    scales, ratios = recipe.detection.anchors.scales, recipe.detection.anchors.aspect_ratios
    if not ratios:
        text = "needs one list per feature map ([] for squares only)"
        yield Contradiction(("detection.anchors.aspect_ratios",), text)
    if len(scales) != len(ratios) + 1:
        yield Contradiction(
            ("detection.anchors.scales", "detection.anchors.aspect_ratios"),
            f"has {len(scales)} values, but the {len(ratios)} feature maps of detection.anchors.aspect_ratios need "
            f"{len(ratios) + 1}: one each and one more",
        )
    for before, after in pairwise(scales):
        if before >= after:
            yield Contradiction(("detection.anchors.scales",), f"must increase, but {after:g} follows {before:g}")
    if any(ratio == 1 for own in ratios for ratio in own):
        yield Contradiction(("detection.anchors.aspect_ratios",), "must not contain 1: every map has squares anyway")


def results_rules(recipe: Recipe) -> Iterator[Contradiction]:
    """Accuracies are fractions wherever they are expected, published or measured."""
    expect, known = recipe.expect, _METRICS[recipe.task]
    best = recipe.evaluate.best_metric
    if best is not None and recipe.task == "detection":
        yield Contradiction(("evaluate.best_metric", "task"), "is for task: classification; use detection.metric")
    elif best is not None and (best.endswith("loss") or (best not in known and not recipe.metrics)):
        text = f"{best} is neither {' nor '.join(known[:-1])}, and `metrics` names no custom one"
        text = f"{best} is better when smaller; a larger value must be better" if best.endswith("loss") else text
        yield Contradiction(("evaluate.best_metric", "metrics"), text)
    if expect is not None and expect.metric not in known and not recipe.metrics:
        text = f"{expect.metric} is not a metric of {recipe.task}, which has {join_words(known)}; null expects nothing"
        yield Contradiction(("expect.metric", "task"), text)
    results = [
        ("expect.value", expect),
        *(("published", result) for result in recipe.published),
        *(("measured", result) for result in recipe.measured),
    ]
    for field, result in results:
        if result is None or result.value is None or result.metric not in known or result.metric == "loss":
            continue
        if not 0 <= result.value <= 1:
            text = f"must be a fraction between 0 and 1; for {result.value} percent write {result.value / 100:g}"
            yield Contradiction((field,), text if field == "expect.value" else f"the value {text}")
