"""How published weights (`torchvision:NAME`, `timm:NAME`) are meant to be used: their network and its preprocessing."""

from __future__ import annotations

import importlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from reconv.checkpoint.download_weights import TORCHVISION
from reconv.recipe.schema import Recipe

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
