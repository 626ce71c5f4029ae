"""Reads weights files by themselves: ours with metadata, those of other programs, and published ones."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from reconv.build.saved_model import SavedModel, allow_code
from reconv.checkpoint.download_weights import TORCHVISION
from reconv.checkpoint.load_weights import read_weights
from reconv.checkpoint.locate import is_tensorflow
from reconv.checkpoint.weights_metadata import read_metadata
from reconv.core.custom_code import TrustCode
from reconv.core.errors import CheckpointError, UsageError
from reconv.data.readers.imagenet.classes import NUM_IMAGENET_CLASSES, imagenet_names, with_imagenet_names
from reconv.recipe.loader import load
from reconv.recipe.parts.code import add_code_path
from reconv.recipe.schema import Recipe

CLASSIFIER_HEADS = ("fc.weight", "classifier.weight", "classifier.1.weight", "linear.weight")


DETECTOR_HEAD = "class_heads.0.weight"


NUM_CLASSES_TENSORFLOW = 1001  # ImageNet's 1000 classes after a background class


def read_weights_file(
    path: Path, recipe: str | None, trust_code: TrustCode, model: Any, published_name: str
) -> SavedModel:
    """The weights of a file by itself, with the recipe and the classes of its metadata, or a recipe that is named."""
    tensors = read_weights(path)  # first, so that a file that holds no weights gets the error that says so
    if recipe is not None:
        named = load(recipe).recipe
        add_code_path(named)
        return _without_metadata(path, tensors, named)
    metadata = read_metadata(path)
    if metadata is None and (published := published_model(published_name)) is not None:
        return _without_metadata(path, tensors, published.recipe, published.num_classes)
    if metadata is None:
        raise UsageError(
            f"{path} does not say which model it belongs to",
            why="weights files of Reconv do; files of other programs hold only tensors",
            hint="pass --recipe, as in --recipe resnet50 (for a teacher: --set distill.teacher_recipe=resnet50)",
        )
    allow_code(metadata.recipe, trust_code, path, model)
    saved = SavedModel(
        recipe=metadata.recipe,
        class_names=metadata.class_names,
        has_class_names=True,
        tensors=tensors,
        path=path,
        weights=metadata.weights,
        step=metadata.step,
        class_ids=metadata.class_ids,
        display_names=with_imagenet_names(metadata.class_names),
        confidence=metadata.confidence,
    )
    return saved if metadata.class_names else _without_metadata(path, tensors, metadata.recipe)


def _without_metadata(
    path: Path, tensors: dict[str, Tensor], recipe: Recipe, num_classes: int | None = None
) -> SavedModel:
    num_classes = num_classes or _num_classes(tensors, path, recipe)
    if is_tensorflow(path) and num_classes == NUM_CLASSES_TENSORFLOW:
        num_classes -= 1
        tensors = read_weights(path, num_classes=num_classes)
    is_imagenet = num_classes == NUM_IMAGENET_CLASSES and recipe.task == "classification"
    names = tuple(imagenet_names() if is_imagenet else map(str, range(num_classes)))
    return SavedModel(recipe, names, False, tensors, path, "raw", None, display_names=with_imagenet_names(names))


def _num_classes(tensors: dict[str, Tensor], path: Path, recipe: Recipe) -> int:
    """The number of classes of a bare weights file, from the output size of its classification head.

    A detector's head has them for every anchor of a cell, and one more for the background.
    """
    is_detector = recipe.task == "detection"
    known = (DETECTOR_HEAD,) if is_detector else CLASSIFIER_HEADS
    heads = [tensor for name, tensor in tensors.items() if name in known]
    if len(heads) != 1:
        raise CheckpointError(
            "the number of classes cannot be read from this weights file",
            where=str(path),
            why=f"it must contain exactly one of {', '.join(known)}",
        )
    num_outputs = int(heads[0].shape[0])
    return num_outputs // recipe.detection.anchors.per_cell[0] - 1 if is_detector else num_outputs


_HALF = [0.5, 0.5, 0.5]
# The evaluation of torchvision's own weights, where it is not a 224 px crop of 256 px; of EfficientNets crop and size.
_EFFICIENTNET = ((224, 256), (240, 256), (288, 288), (300, 320), (380, 384), (456, 456), (528, 528), (600, 600))
_TORCHVISION_PREPROCESS: Mapping[str, Mapping[str, Any]] = {
    "googlenet": {"mean": _HALF, "std": _HALF},
    **{
        f"efficientnet_b{i}": {"size": size, "resize": resize, "interpolation": "bicubic"}
        for i, (size, resize) in enumerate(_EFFICIENTNET)
    },
    "efficientnet_b1.v2": {"size": 240, "resize": 255},
}


@dataclass(frozen=True, slots=True)
class PublishedModel:
    """A recipe with the network and preprocessing of published weights, and their number of classes if it is known."""

    recipe: Recipe
    num_classes: int | None = None


def published_model(name: str) -> PublishedModel | None:
    """The model that a name such as torchvision:resnet50 stands for; None for a URL or a name that is not known."""
    package, _, model = name.partition(":")
    if package == "torchvision" and model in TORCHVISION:
        plain, _, version = model.partition(".")
        later = {"resize": 232} if version == "v2" else {}
        preprocess = {**later, **_TORCHVISION_PREPROCESS.get(model, {})}
        return PublishedModel(_recipe(plain, preprocess), 1000)
    if package == "timm":
        config = _timm_config(model)
        if config is not None:
            return PublishedModel(
                _recipe(f"timm:{model.partition('.')[0]}", timm_preprocess(model)), config.num_classes
            )
    return None


def _recipe(model: str, preprocess: Mapping[str, Any]) -> Recipe:
    return Recipe.model_validate({"model": {"name": model}, "data": {"preprocess": dict(preprocess)}})


def timm_preprocess(model: str) -> dict[str, Any]:
    """The images that a network of timm was trained on; empty where timm is missing, which is an error later."""
    config = _timm_config(model)
    if config is None:
        return {}
    size = int(config.input_size[-1])
    return {
        "size": size,
        "resize": math.floor(size / (config.crop_pct or 1.0)),
        "mean": list(config.mean),
        "std": list(config.std),
        "interpolation": config.interpolation if config.interpolation in ("bilinear", "bicubic") else "bilinear",
    }


def _timm_config(model: str) -> Any:
    try:
        return importlib.import_module("timm").get_pretrained_cfg(model, allow_unregistered=False)
    except (ImportError, RuntimeError):
        return None
