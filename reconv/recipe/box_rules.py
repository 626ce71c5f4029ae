"""What the fields of a detection recipe say about each other, and which fields of the other task they exclude.

Owns the rules about data and augmentation of images with boxes. Refuses to know the other rules. Invariant: whatever
detection would ignore in silence is a contradiction.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from reconv.recipe.contradiction import Contradiction

if TYPE_CHECKING:
    from reconv.recipe.schema import Recipe

BOX_SOURCES = ("auto", "coco", "voc", "yolo", "tfrecord", "scattered-digits", "synthetic", "synthetic-device")
_BOXES_ONLY = ("coco", "voc", "yolo", "scattered-digits")


def box_contradictions(recipe: Recipe) -> Iterator[Contradiction]:
    """Every contradiction between images with boxes and the rest of the recipe."""
    yield from _jitter(recipe)
    if recipe.task == "detection":
        yield from _data(recipe)
        yield from _augment(recipe)
        return
    detection_only = {
        ("data.source",): recipe.data.source in _BOXES_ONLY,
        ("augment.crop",): recipe.augment.crop == "ssd",
        ("augment.zoom_out.probability",): recipe.augment.zoom_out.probability > 0,
    }
    for fields, is_so in detection_only.items():
        if is_so:
            yield Contradiction((*fields, "task"), "is for task: detection")


def _jitter(recipe: Recipe) -> Iterator[Contradiction]:
    jitter = recipe.augment.color_jitter
    if jitter.on and jitter.implementation == "tensorflow" and recipe.data.preprocess.per_image_standardization:
        yield Contradiction(
            ("augment.color_jitter.implementation", "data.preprocess.per_image_standardization"),
            "tensorflow leaves no whole pixel values, which data.preprocess.per_image_standardization needs",
        )


def _data(recipe: Recipe) -> Iterator[Contradiction]:
    data = recipe.data
    if data.source not in BOX_SOURCES:
        yield Contradiction(("data.source", "task"), f"{data.source} has no boxes; there are {', '.join(BOX_SOURCES)}")
    if data.preprocess.resize is not None:
        text = "cuts out the centre, and detection sees whole images; it must be null"
        yield Contradiction(("data.preprocess.resize", "task"), text)
    if data.background_class:
        yield Contradiction(("data.background_class", "task"), "detection has a background of its own")
    if data.preload == "device":
        yield Contradiction(("data.preload", "task"), "device is for task: classification")


def _augment(recipe: Recipe) -> Iterator[Contradiction]:
    augment = recipe.augment
    excluded = {
        "augment.auto_augment": augment.auto_augment != "none",
        "augment.random_erasing.probability": augment.random_erasing.probability > 0,
        "augment.mixup.alpha": augment.mixup.on,
        "augment.cutmix.alpha": augment.cutmix.on,
    }
    for field, is_on in excluded.items():
        if is_on:
            yield Contradiction((field, "task"), "does not know boxes; it is for task: classification")
    if augment.crop not in ("none", "ssd"):
        yield Contradiction(("augment.crop", "task"), f"{augment.crop} does not know boxes; detection has none and ssd")
    if augment.color_jitter.on and augment.color_jitter.implementation != "tensorflow":
        yield Contradiction(("augment.color_jitter.implementation", "task"), "detection has the form tensorflow alone")
    low, high = augment.ssd_crop.scale
    if low > high:
        text = f"goes from the smaller to the larger, not {low} to {high}"
        yield Contradiction(("augment.ssd_crop.scale",), text)
