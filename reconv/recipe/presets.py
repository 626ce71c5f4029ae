"""The names and files of the presets, and the closest name to a mistyped one.

This module imports neither pydantic nor yaml, so that shell completion and help are instant.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from functools import cache
from pathlib import Path

# Where to start, in this order; `reconv recipes --all` lists the others.
RECOMMENDED = (
    "quickstart",
    "quickstart-detection",
    "finetune",
    "finetune-detection",
    "resnet18",
    "resnet50",
    "resnet50-rsb-a2",
    "mobilenet-v2-habana-8card-bf16",
    "efficientnet-b0-nv-400ep-8gpu-mixed",
    "resnext101-nv-90ep-8gpu-mixed",
    "ssd-resnet34",
    "ssd-resnet34-voc",
    "cifar10-fast",
)
PRESETS = Path(__file__).resolve().parent.parent / "recipes"


@cache
def _files() -> dict[str, Path]:
    return {path.stem: path for path in PRESETS.glob("*/*.yaml")}


def preset_names() -> list[str]:
    """The names of all presets, sorted; the vendor's folder is not part of a name."""
    return sorted(_files())


def preset_path(name: str) -> Path:
    """The file of a preset; the name must be one of `preset_names`."""
    return _files()[name]


def preset_vendor(name: str) -> str:
    """Publisher of a preset, by its folder: nvidia, habana, graphcore, torchvision, ... or reconv."""
    return preset_path(name).parent.name


def recommended_presets() -> list[str]:
    """The presets to start with."""
    return [name for name in RECOMMENDED if name in _files()]


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """The choice that `word` most likely meant, or None if none is close."""
    by_lower = {choice.lower(): choice for choice in choices}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return by_lower[close[0]] if close else None
