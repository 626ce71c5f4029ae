"""What a person means by RUN or WEIGHTS, read: tensors, the recipe they were trained with, and the names of classes.

Owns how a run folder, a checkpoint, a weights file or a published name becomes tensors and then a network. Refuses to
know what the network is for. Invariant: a network is built from the recipe saved with its weights; only weights
without one need to be told theirs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torch import Tensor

from reconv.checkpoint.download_weights import fetch_weights, is_remote
from reconv.checkpoint.interop.tensorflow import is_tensorflow
from reconv.checkpoint.load_weights import apply, read_weights
from reconv.checkpoint.locate import EMA, Located, locate
from reconv.checkpoint.store import Store
from reconv.device import Device
from reconv.errors import CheckpointError, UsageError
from reconv.io.download import Progress
from reconv.precision import at_least_float32
from reconv.recipe.loader import load
from reconv.recipe.schema import Recipe
from reconv.trainer.build.network import Network, build_network

HEADS = ("fc.weight", "classifier.weight", "classifier.1.weight", "linear.weight")  # of the networks we build
DETECTOR_HEAD = "class_heads.0.weight"
WITH_BACKGROUND = 1001  # ImageNet's classes and, first, the background that TensorFlow's programs add


@dataclass(frozen=True, slots=True)
class Named:
    """Weights that a person named, found on this machine."""

    located: Located
    notes: tuple[str, ...] = ()  # how they came here


@dataclass(frozen=True, slots=True)
class SavedModel:
    """Weights and what was saved with them."""

    recipe: Recipe
    class_names: tuple[str, ...]
    has_names: bool  # False: the classes are only counted
    tensors: dict[str, Tensor]
    path: Path
    weights: str  # raw, ema or averaged
    step: int | None
    class_ids: tuple[int, ...] = ()  # a detector's: the numbers its data had for the classes


def find_weights(
    name: str | Path, which: Literal["newest", "best"] = "newest", tell: Callable[[str], None] | None = None
) -> Named:
    """The file, run or checkpoint that a name means; what lies elsewhere is fetched into the cache, and told so."""
    if is_remote(str(name)):
        fetched = fetch_weights(str(name), progress=None if tell is None else _quarters(str(name), tell))
        return Named(Located("weights", None, None, fetched.path), (f"{name}: {fetched.note}",))
    return Named(locate(name, which=which))


def _quarters(name: str, tell: Callable[[str], None]) -> Progress:
    """Tell of a download when it begins, and at each quarter of it."""
    told = -1

    def progress(there: int, total: int | None) -> None:
        nonlocal told
        quarter = 4 * there // total if total else 0
        if quarter > told:
            told = quarter
            of = f" of {total / 1e6:.1f} MB" if total else ""
            tell(f"fetching {name}: {there / 1e6:.1f}{of}")

    return progress


def read_saved(located: Located, *, weights: str, recipe: str | None) -> SavedModel:
    """The tensors of a run, a checkpoint or a weights file, and the recipe that made them."""
    if located.checkpoint is None:
        return _read_bare(located.weights, recipe)
    loaded = Store(located.checkpoint.parent).load(located.checkpoint)
    chosen = _chosen(located, weights, "ema" in loaded.parts)
    if chosen == "averaged":
        tensors = read_weights(_averaged_file(located))
    else:
        tensors = dict(loaded.parts["ema" if chosen == "ema" else "model"])
    return SavedModel(
        recipe=Recipe.model_validate(loaded.state["recipe"]),
        class_names=tuple(loaded.state["class_names"]),
        has_names=True,
        tensors=tensors,
        path=located.checkpoint,
        weights=chosen,
        step=int(loaded.state["step"]),
        class_ids=tuple(loaded.state.get("class_ids", ())),
    )


def build_saved(saved: SavedModel, recipe: Recipe, device: Device) -> Network:
    """The network of saved weights, with them in it; `recipe` is theirs, or differs in how it computes."""
    network = build_network(recipe, len(saved.class_names), device)
    at_least_float32(network.model)
    apply(network.model, saved.tensors, strict=True, source=str(saved.path))
    return network


def _read_bare(path: Path, recipe: str | None) -> SavedModel:
    tensors = read_weights(path)  # first: an image in the place of a run is no file of weights without a recipe
    if recipe is None:
        raise UsageError(
            f"{path} is a bare weights file: its recipe is not known",
            then="name it with --recipe, as in --recipe resnet50 (a teacher's: --set distill.recipe=resnet50)",
        )
    named = load(recipe).recipe
    num_classes = _num_classes(tensors, path, named)
    if is_tensorflow(path) and num_classes == WITH_BACKGROUND:
        num_classes -= 1
        tensors = read_weights(path, num_classes=num_classes)
    names = tuple(str(i) for i in range(num_classes))
    return SavedModel(named, names, False, tensors, path, "raw", None)


def _chosen(located: Located, wish: str, has_ema: bool) -> str:
    """Which of a checkpoint's weights are meant: those of the file that was named, else averaged before raw ones."""
    if located.kind == "weights":
        return "ema" if located.weights.name == EMA else "raw"
    if wish == "auto":
        return "ema" if has_ema else "raw"
    if wish == "ema" and not has_ema:
        raise CheckpointError("this run has no averaged weights", where=str(located.checkpoint), then="leave --ema out")
    return wish


def _averaged_file(located: Located) -> Path:
    """The average of checkpoints in the run folder."""
    file = None if located.run is None else located.run.averaged
    if file is None or not file.is_file():
        raise CheckpointError(
            "there is no average of checkpoints in this run",
            where=str(file or located.checkpoint),
            then=f"make one: reconv average {located.run.path if located.run else 'RUN'} --last 5ep",
        )
    return file


def _num_classes(tensors: dict[str, Tensor], path: Path, recipe: Recipe) -> int:
    """The number of classes of a bare weights file: the rows of its one fully connected layer of the head.

    A detector's has them for each box of a cell, and one more class, the background.
    """
    is_detector = recipe.task == "detection"
    known = (DETECTOR_HEAD,) if is_detector else HEADS
    heads = [t for name, t in tensors.items() if name in known]
    if len(heads) != 1:
        raise CheckpointError(
            "no head in this weights file tells its number of classes",
            where=str(path),
            why=f"looked for {', '.join(known)}",
        )
    rows = int(heads[0].shape[0])
    return rows // recipe.detection.boxes.per_cell[0] - 1 if is_detector else rows
