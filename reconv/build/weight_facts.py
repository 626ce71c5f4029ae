"""Facts about initial weights: the network they belong to and the images it was trained on."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from reconv.build.init_weights import check_weights_exist
from reconv.build.saved_model import find_weights
from reconv.build.weights_file import timm_preprocess
from reconv.checkpoint.download_weights import TORCHVISION
from reconv.checkpoint.load_weights import compare_weights, read_weights
from reconv.checkpoint.locate import LocatedWeights, is_remote, read_located
from reconv.checkpoint.store import CheckpointStore
from reconv.checkpoint.weights_metadata import read_metadata
from reconv.core.errors import UsageError
from reconv.models import build_model, model_names
from reconv.models.frozen import head_patterns
from reconv.recipe.derive import WeightFacts
from reconv.recipe.schema import Recipe

_HALF = [0.5, 0.5, 0.5]
_TORCHVISION_PREPROCESS: Mapping[str, Mapping[str, Any]] = {"googlenet": {"size": 224, "mean": _HALF, "std": _HALF}}


def weight_facts(recipe: Recipe, *, is_model_set: bool) -> WeightFacts | None:
    """Facts about the initial weights of a recipe; None without any.

    The tensors of a file identify its network, unless the user names it (`is_model_set`).
    """
    name = recipe.model.init
    if name is None:
        return None
    check_weights_exist(recipe)
    package, _, model = name.partition(":")
    if package == "torchvision":
        plain = model.removesuffix(".v2")
        ours = plain if plain in model_names() or model not in TORCHVISION else f"torchvision:{plain}"
        return WeightFacts(name, ours, preprocess=_TORCHVISION_PREPROCESS.get(plain, {}))
    if package == "timm":
        return WeightFacts(name, f"timm:{model.partition('.')[0]}", preprocess=timm_preprocess(model))
    if is_remote(name) and is_model_set:
        return WeightFacts(name)

    def read(located: LocatedWeights) -> WeightFacts:
        metadata = read_metadata(located.weights)
        if metadata is not None:
            return _of_recipe(name, metadata.recipe.model_dump(mode="json"))
        if located.checkpoint is not None:  # of a version that wrote no metadata into files
            return _of_recipe(name, CheckpointStore(located.checkpoint.parent).read_state(located.checkpoint)["recipe"])
        return WeightFacts(name) if is_model_set else _identified(name, located.weights)

    return read_located(find_weights(name).located, read)


def _identified(name: str, path: Path) -> WeightFacts:
    """The facts about a weights file that says nothing about itself."""
    return WeightFacts(name, identify(read_weights(path), path))


def _of_recipe(name: str, recipe: Mapping[str, Any]) -> WeightFacts:
    """The network and preprocessing of the recipe that weights were trained with."""
    anchors = recipe["detection"]["anchors"] if recipe["task"] == "detection" else {}
    model, short_name = recipe["model"], _short(name)
    return WeightFacts(short_name, model["name"], model["options"], recipe["data"]["preprocess"], anchors)


def _short(name: str) -> str:
    """A path relative to the working directory where that is shorter."""
    path = Path(name)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else name


def identify(tensors: Mapping[str, Tensor], path: Path) -> str:
    """The one network of ours whose tensors, apart from the head, are those of a file; an error unless it is one."""
    found = [name for name in model_names() if _is_of(name, tensors)]
    if len(found) == 1:
        return found[0]
    why = f"its tensors fit {', '.join(found)}" if found else "no model here has tensors of these names and shapes"
    raise UsageError(
        "the model of this weights file cannot be identified",
        where=str(path),
        why=why,
        hint=f"add --model NAME, as in --model {found[0] if found else 'resnet50'}",
    )


@cache
def _without_values(name: str) -> nn.Module:
    with torch.device("meta"):
        return build_model(name)


def _is_of(name: str, tensors: Mapping[str, Tensor]) -> bool:
    model = _without_values(name)
    report = compare_weights(model, tensors)
    head = tuple(pattern.removesuffix("*") for pattern in head_patterns(model))
    other = [*report.missing, *report.unexpected, *(name for name, _, _ in report.reshaped)]
    return bool(report.loaded) and all(tensor.startswith(head) for tensor in other)
