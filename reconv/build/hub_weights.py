"""Weights of the Hugging Face Hub as weights files of Reconv: timm's tensors get our names, its config a recipe."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from reconv.build.package_networks import TIMM_NETWORKS, timm_names
from reconv.checkpoint.download_weights import DownloadedWeights, download_hub_config, download_weights
from reconv.checkpoint.load_weights import read_weights
from reconv.checkpoint.safetensors_bytes import encode
from reconv.checkpoint.weights_metadata import KEY, WeightsMetadata, read_header, to_header
from reconv.core.errors import CheckpointError
from reconv.data.readers.imagenet.classes import NUM_IMAGENET_CLASSES, imagenet_names
from reconv.models import build_model
from reconv.recipe.schema import Recipe
from reconv.storage.bounded import parse_shallow_json, read_text
from reconv.storage.download import Progress
from reconv.storage.files import write_atomic

_MAX_CONFIG_BYTES = 4 << 20
_MAX_CLASSES = 1 << 16


@dataclass(frozen=True, slots=True)
class TimmConfig:
    """The content of config.json of a repository in timm's format."""

    architecture: str
    num_classes: int
    label_names: tuple[str, ...]
    preprocess: Mapping[str, Any]

    @property
    def network(self) -> str | None:
        """Our network of the same layers; None if there is none."""
        return next((ours for ours, theirs in TIMM_NETWORKS.items() if theirs == self.architecture), None)


def fetch_hub_weights(name: str, progress: Progress | None = None) -> DownloadedWeights:
    """Download hf://OWNER/MODEL unless it is in the cache.

    A network in timm's format that we have, too, is written again with our names and metadata, beside the download.
    """
    weights = download_weights(name, progress=progress)
    config_file = download_hub_config(name)
    config = None if config_file is None else read_timm_config(config_file, name)
    if config is None or config.network is None:
        return weights
    return DownloadedWeights(_translated(weights.path, config, config.network), weights.note)


def read_timm_config(path: Path, name: str) -> TimmConfig | None:
    """The content of config.json; None if it is in another format."""
    try:
        content = parse_shallow_json(read_text(path, _MAX_CONFIG_BYTES).decode())
    except (OSError, ValueError) as error:
        raise CheckpointError(f"config.json of {name} cannot be read", where=str(path), why=str(error)) from error
    if not isinstance(content, dict) or not isinstance(content.get("architecture"), str):
        return None
    pretrained = content.get("pretrained_cfg")
    pretrained = pretrained if isinstance(pretrained, dict) else {}
    labels = content.get("label_names")
    num_classes = content.get("num_classes", pretrained.get("num_classes"))
    try:
        return TimmConfig(
            content["architecture"],
            num_classes if type(num_classes) is int and 0 < num_classes <= _MAX_CLASSES else 0,
            tuple(map(str, labels)) if isinstance(labels, list) else (),
            _preprocess(pretrained),
        )
    except (KeyError, TypeError, ValueError, IndexError, ZeroDivisionError, OverflowError) as error:
        raise CheckpointError(f"config.json of {name} is malformed", where=str(path), why=repr(error)) from error


def _preprocess(pretrained: Mapping[str, Any]) -> dict[str, Any]:
    """The recipe's `data.preprocess` for timm's `pretrained_cfg`."""
    if "input_size" not in pretrained:
        return {}
    channels, size = int(pretrained["input_size"][0]), int(pretrained["input_size"][-1])
    interpolation = pretrained.get("interpolation")
    return {
        "size": size,
        "channels": channels,
        "resize": math.floor(size / float(pretrained.get("crop_pct") or 1)),
        "mean": [float(value) for value in pretrained["mean"]],
        "std": [float(value) for value in pretrained["std"]],
        "interpolation": interpolation if interpolation in ("bilinear", "bicubic") else "bilinear",
    }


def _translated(path: Path, config: TimmConfig, network: str) -> Path:
    """The weights with our names and metadata; those that have them already as they are."""
    header, tensors = read_header(path), read_weights(path)
    ours = _our_names(network, tensors)
    if KEY in header and ours is None:
        return path
    translated = path.with_name(f"{path.stem}-reconv{path.suffix}")
    renamed = tensors if ours is None else {ours.get(name, name): tensor for name, tensor in tensors.items()}
    new_header = {"format": "pt", KEY: header[KEY]} if KEY in header else _header(config, network)
    write_atomic(translated, encode(renamed, new_header))
    return translated


def _our_names(network: str, tensors: Mapping[str, Tensor]) -> dict[str, str] | None:
    """Our name of each of timm's tensors; None if the tensors have our names."""
    with torch.device("meta"):
        names = timm_names(network, build_model(network).state_dict())
    return None if set(names) >= set(tensors) else {theirs: ours for ours, theirs in names.items()}


def _header(config: TimmConfig, network: str) -> dict[str, str]:
    """Our metadata for a repository of timm."""
    names = config.label_names if len(config.label_names) == config.num_classes else ()
    if not names and config.num_classes == NUM_IMAGENET_CLASSES:
        names = tuple(imagenet_names())
    content: dict[str, Any] = {"name": config.architecture, "model": {"name": network}}
    if config.preprocess:
        content["data"] = {"preprocess": dict(config.preprocess)}
    return to_header(WeightsMetadata(Recipe.model_validate(content), names))
