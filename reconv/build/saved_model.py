"""Loads trained weights: from a run, a checkpoint, a weights file or a published name, to a network on a device.

A network is built from the recipe saved with its weights. A weights file that Reconv wrote has one in its metadata; any
other needs the name of its recipe.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from reconv.build.model import Network, build_network
from reconv.checkpoint.load_weights import load_weights, read_weights
from reconv.checkpoint.locate import EMA, HUB, LocatedWeights, is_remote, locate, read_located
from reconv.checkpoint.manifest import check_state, confidence_in_state
from reconv.checkpoint.store import CheckpointStore, LoadedCheckpoint
from reconv.core.code_folders import add_folders
from reconv.core.confidence import ConfidenceCalibration
from reconv.core.custom_code import TrustCode, provide, require_trust
from reconv.core.errors import CheckpointError
from reconv.data.readers.imagenet.classes import with_imagenet_names
from reconv.device import Device
from reconv.precision import at_least_float32
from reconv.recipe.parts.code import code_references
from reconv.recipe.schema import Recipe
from reconv.report.evaluation_files import read_confidence
from reconv.storage.download import Progress

if TYPE_CHECKING:
    from reconv.checkpoint.download_weights import DownloadedWeights

_CODE_OF_EVALUATION = ("model.name", "data.source", "metrics")  # the fields whose code prediction and evaluation use


@dataclass(frozen=True, slots=True)
class FoundWeights:
    """Weights named by the user, now on this machine."""

    located: LocatedWeights
    notes: tuple[str, ...] = ()  # where they were downloaded from


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Weights and what was saved with them."""

    recipe: Recipe
    class_names: tuple[str, ...]
    has_class_names: bool  # False: only their number is known; the names are indices, of 1,000 classes ImageNet's
    tensors: dict[str, Tensor]
    path: Path
    weights: str  # raw, ema or averaged
    step: int | None
    class_ids: tuple[int, ...] = ()  # detectors: the category ids of the training data
    data_fingerprint: Mapping[str, str] = field(default_factory=dict)  # of the data it was trained on
    display_names: tuple[str, ...] = ()  # of the classes, for people
    confidence: ConfidenceCalibration | None = None


def find_weights(
    name: str | Path,
    which: Literal["newest", "best"] = "newest",
    log: Callable[[str], None] | None = None,
    *,
    loads: bool = False,
) -> FoundWeights:
    """The file, run or checkpoint that `name` stands for; a URL or a published name is downloaded to the cache.

    With `loads` a checkpoint is loaded, too.
    """
    if is_remote(str(name)):
        fetched = _fetch(str(name), None if log is None else _log_quarters(str(name), log))
        located = LocatedWeights("weights", None, None, fetched.path, name=str(name))
        return FoundWeights(located, (f"{name}: {fetched.note}",))
    return FoundWeights(locate(name, which=which, loads=loads))


def _fetch(name: str, progress: Progress | None) -> DownloadedWeights:
    """Published weights in the cache."""
    if name.startswith(HUB):
        from reconv.build.hub_weights import fetch_hub_weights  # with the networks of timm

        return fetch_hub_weights(name, progress)
    from reconv.checkpoint.download_weights import download_weights

    return download_weights(name, progress=progress)


def _log_quarters(name: str, log: Callable[[str], None]) -> Progress:
    """Log the start of a download and every quarter of it."""
    last_logged = -1

    def progress(num_bytes: int, total: int | None) -> None:
        nonlocal last_logged
        quarter = 4 * num_bytes // total if total else 0
        if quarter > last_logged:
            last_logged = quarter
            of_total = f" of {total / 1e6:.1f} MB" if total else ""
            log(f"downloading {name}: {num_bytes / 1e6:.1f}{of_total}")

    return progress


def recipe_of_state(state: Mapping[str, Any], checkpoint: Path) -> Recipe:
    """The recipe in the state of a checkpoint."""
    try:
        return Recipe.model_validate(state["recipe"])
    except ValidationError as error:
        raise CheckpointError(
            "this version of Reconv cannot read the recipe of this checkpoint",
            where=str(checkpoint),
            why=f"{error.error_count()} fields are unknown or invalid: another version may have written it",
            hint="use its weights with a recipe of this version: --recipe NAME with model.safetensors",
        ) from error


def _load_checkpoint(located: LocatedWeights) -> tuple[LocatedWeights, LoadedCheckpoint]:
    """A checkpoint in memory, and where it was: another one than at first if retention has deleted that."""
    assert located.checkpoint is not None
    loaded = located.loaded or CheckpointStore(located.checkpoint.parent).load(located.checkpoint)
    check_state(loaded.state, located.checkpoint)
    if "model" not in loaded.parts:
        raise CheckpointError("the checkpoint has no weights", where=str(located.checkpoint), hint="use another one")
    return located, loaded


def read_saved_model(
    located: LocatedWeights, *, weights: str, recipe: str | None, trust_code: TrustCode = False, model: Any = None
) -> SavedModel:
    """The tensors of a run, a checkpoint or a weights file, and the recipe they were trained with.

    Where that recipe names code that prediction or evaluation would import, `trust_code` must allow it. `model` is the
    network of a run that got it from Python.
    """
    if located.checkpoint is None:
        from reconv.build.weights_file import read_weights_file  # with the presets, which a checkpoint does not need

        return read_weights_file(located.weights, recipe, trust_code, model, located.name)
    located, loaded = read_located(located, _load_checkpoint)
    assert located.checkpoint is not None
    saved_recipe = recipe_of_state(loaded.state, located.checkpoint)
    allow_code(saved_recipe, trust_code, located.checkpoint, model)
    chosen = _choose_weights(located, weights, "ema" in loaded.parts)
    if chosen == "averaged":
        tensors = read_weights(_averaged_file(located))
    else:
        tensors = dict(loaded.parts["ema" if chosen == "ema" else "model"])
    return SavedModel(
        recipe=saved_recipe,
        class_names=tuple(loaded.state["class_names"]),
        has_class_names=True,
        tensors=tensors,
        path=located.checkpoint,
        weights=chosen,
        step=loaded.step,
        class_ids=tuple(loaded.state.get("class_ids", ())),
        data_fingerprint=loaded.state.get("data_fingerprint", {}),
        display_names=tuple(loaded.state.get("display_names", with_imagenet_names(loaded.state["class_names"]))),
        confidence=_confidence(located, loaded, chosen),
    )


def _confidence(located: LocatedWeights, loaded: LoadedCheckpoint, weights: str) -> ConfidenceCalibration | None:
    """The calibrated confidence of the weights: by `reconv eval --calibrate`, or by the end of the run."""
    fitted = None if located.run is None else read_confidence(located.run.path, loaded.step, weights)
    return fitted or confidence_in_state(loaded.state, loaded.step, weights)


def read_saved_recipe(located: LocatedWeights) -> Recipe:
    """The recipe of a run or a checkpoint; the code that it names is not imported."""
    located, loaded = read_located(located, _load_checkpoint)
    assert located.checkpoint is not None
    return recipe_of_state(loaded.state, located.checkpoint)


def build_saved_model(saved: SavedModel, recipe: Recipe, device: Device) -> Network:
    """A network with the saved weights; `recipe` is the saved one, or differs from it only in how it computes."""
    network = build_network(recipe, len(saved.class_names), device, initializes=False)
    at_least_float32(network.model)
    load_weights(network.model, saved.tensors, strict=True, source=str(saved.path))
    return network


def model_digest(module: nn.Module, recipe: Recipe, classes: Sequence[str]) -> str:
    """A digest of the weights, the classes and the preprocessing."""
    digest = hashlib.sha256(repr((tuple(classes), recipe.data.preprocess, recipe.model)).encode())
    for name, tensor in sorted(module.state_dict().items()):
        content = tensor.detach().cpu().contiguous().flatten().view(torch.uint8)
        digest.update(name.encode() + content.numpy().tobytes())
    return digest.hexdigest()


def allow_code(recipe: Recipe, trust_code: TrustCode, path: Path, model: Any = None) -> None:
    """Make the code of a saved recipe importable if it is trusted; raises if it is needed and not trusted."""
    if model is not None:
        provide({recipe.model.name: model})
    needed = [reference for reference in code_references(recipe) if reference.field in _CODE_OF_EVALUATION]
    require_trust(needed, recipe.code_path, trust_code, str(path))
    if needed:
        add_folders(recipe.code_path)


def _choose_weights(located: LocatedWeights, weights: str, has_ema: bool) -> str:
    """Select the weights of a checkpoint to load: those of the named file; else, for `auto`, EMA where there is one."""
    if located.kind == "weights":
        return "ema" if located.weights.name == EMA else "raw"
    if weights == "auto":
        return "ema" if has_ema else "raw"
    if weights == "ema" and not has_ema:
        raise CheckpointError("this checkpoint has no EMA weights", where=str(located.checkpoint), hint="omit --ema")
    return weights


def _averaged_file(located: LocatedWeights) -> Path:
    file = None if located.run is None else located.run.averaged
    if file is None or not file.is_file():
        raise CheckpointError(
            "this run has no averaged checkpoint",
            where=str(file or located.checkpoint),
            hint=f"create it: reconv average {located.run.path if located.run else 'RUN'} --last 5ep",
        )
    return file


@dataclass(frozen=True, slots=True)
class ModelClasses:
    """The classes of a model, and the data it was trained on."""

    names: tuple[str, ...]
    are_known: bool  # False: a bare weights file, which has no names
    data_fingerprint: Mapping[str, str] = field(default_factory=dict)  # of the training and validation sets
    display_names: tuple[str, ...] = ()  # for people; data may use these too

    def indices(self) -> dict[str, int]:
        """The class index of each name, and of each display name that is not ambiguous."""
        counts = Counter(self.display_names)
        shown = {name: index for index, name in enumerate(self.display_names) if counts[name] == 1}
        return shown | {name: index for index, name in enumerate(self.names)}
