"""Metadata of a weights file: the model, its preprocessing and its classes, in the safetensors header.

With it, `reconv eval weights.safetensors` needs no recipe. The text is JSON under the key `reconv`. It holds no paths,
times or settings of training, so equal weights of equal models give equal files. A file may come from a stranger:
what is read here is data, bounded in size and checked against the recipe schema.

Preprocessing is saved with every model and used by evaluation and prediction
(tests/checkpoint/test_weights_metadata.py).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors
from pydantic import ValidationError

from reconv.core.confidence import ConfidenceCalibration
from reconv.core.errors import CheckpointError
from reconv.recipe.schema import Recipe
from reconv.storage.bounded import open_file, parse_shallow_json

KEY = "reconv"
FORMAT = 1
WEIGHTS = ("raw", "ema", "averaged")
MAX_BYTES = 4 << 20  # 21,841 ImageNet classes with long names take about 1 MiB
# What evaluation and prediction read of a recipe. Everything else has its default value after reading.
_SECTIONS: Mapping[str, Any] = {
    "name": True,
    "task": True,
    "model": {"name", "options", "zero_init_last"},
    "data": {"preprocess"},
    "precision": True,
    "evaluate": {"tta"},
}
_BUILT_IN_DATA = ("digits", "scattered-digits")
_DETECTION_SECTIONS: Mapping[str, Any] = {"detection": True, "augment": True, "loss": True}


@dataclass(frozen=True, slots=True)
class WeightsMetadata:
    """The metadata of a weights file."""

    recipe: Recipe
    class_names: tuple[str, ...]  # empty: the file does not have them
    class_ids: tuple[int, ...] = ()  # detectors: the category ids of the training data
    weights: str = "raw"  # or ema, averaged
    step: int | None = None
    version: str = ""  # of Reconv
    confidence: ConfidenceCalibration | None = None


def to_header(metadata: WeightsMetadata) -> dict[str, str]:
    """The metadata as a safetensors header takes it; class names that would make it too large are left out."""
    recipe = metadata.recipe
    sections = {**_SECTIONS, **(_DETECTION_SECTIONS if recipe.task == "detection" else {})}
    if recipe.data.source in _BUILT_IN_DATA:
        sections["data"] = {"preprocess", "source"}
    if ":" in recipe.model.name:
        sections["code_path"] = True  # where a model of the user is imported from
    content: dict[str, Any] = {
        "format": FORMAT,
        "version": metadata.version,
        "weights": metadata.weights,
        "step": metadata.step,
        "recipe": recipe.model_dump(mode="json", include=sections),
        "class_names": list(metadata.class_names),
        "class_ids": list(metadata.class_ids),
        **({} if metadata.confidence is None else {"confidence": metadata.confidence.to_dict()}),
    }
    text = json.dumps(content, sort_keys=True)
    if len(text) > MAX_BYTES:
        text = json.dumps({**content, "class_names": [], "class_ids": []}, sort_keys=True)
    return {"format": "pt", KEY: text} if len(text) <= MAX_BYTES else {"format": "pt"}


def read_metadata(path: Path) -> WeightsMetadata | None:
    """The metadata of a weights file; None if it has none. Raises `CheckpointError` if it is malformed."""
    text = read_header(path).get(KEY)
    if text is None:
        return None
    if len(text) > MAX_BYTES:
        raise _malformed(path, f"it has {len(text):,} bytes, more than {MAX_BYTES:,}")
    try:
        content = parse_shallow_json(text)
    except ValueError as error:
        raise _malformed(path, f"not JSON: {error}") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT:
        found = content.get("format") if isinstance(content, dict) else type(content).__name__
        raise _malformed(path, f"its format is {str(found)[:40]}, and this version reads format {FORMAT}")
    try:
        return WeightsMetadata(
            recipe=Recipe.model_validate(content["recipe"]),
            class_names=tuple(_items(content, "class_names", str)),
            class_ids=tuple(_items(content, "class_ids", int)),
            weights=_one_of(content["weights"], WEIGHTS),
            step=_step(content["step"]),
            version=str(content["version"])[:40],
            confidence=ConfidenceCalibration.from_dict(content["confidence"]) if content.get("confidence") else None,
        )
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(map(str, first["loc"]))
        raise _malformed(path, f"recipe field {field[:80]}: {first['msg'][:200]}") from error
    except (KeyError, TypeError, ValueError) as error:
        raise _malformed(path, f"{type(error).__name__}: {str(error)[:200]}") from error


def read_header(path: Path) -> dict[str, str]:
    """All metadata in the header of a safetensors file, unchecked; empty for other files."""
    try:
        with open_file(path) as file:
            if file.read(9)[8:] != b"{":  # eight bytes of length, then a JSON header
                return {}
        with safetensors.safe_open(path, "pt") as weights:
            return dict(weights.metadata() or {})
    except (OSError, safetensors.SafetensorError):
        return {}  # reading the tensors gives the error


def _items(content: Mapping[str, Any], name: str, kind: type) -> Sequence[Any]:
    items = content[name]
    if not isinstance(items, list) or not all(type(item) is kind for item in items):
        raise TypeError(f"{name} is not a list of {kind.__name__}")
    return items


def _one_of(value: object, choices: Sequence[str]) -> str:
    if value not in choices:
        raise ValueError(f"weights is none of {', '.join(choices)}")
    return str(value)


def _step(value: object) -> int | None:
    if value is not None and (type(value) is not int or value < 0):
        raise TypeError("step is not a number of steps")
    return value


def _malformed(path: Path, why: str) -> CheckpointError:
    return CheckpointError(
        "the metadata of this weights file cannot be used",
        where=str(path),
        why=why,
        hint="name the recipe of its weights yourself: --recipe NAME",
    )
