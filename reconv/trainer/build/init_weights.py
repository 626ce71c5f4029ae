"""What a run starts from: weights by any name a person may give them, and the part of the network that is trained.

Implements `model.init`, `model.freeze_backbone` and `model.trainable`. Whatever was kept, new or dropped is logged.
A run that goes on from its own checkpoint does not need the weights it once started from.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from reconv.checkpoint.download_weights import is_remote
from reconv.checkpoint.interop.tensorflow import is_tensorflow
from reconv.checkpoint.load_weights import first_few, load_weights, read_weights
from reconv.errors import CheckpointError
from reconv.inference.load_model import FoundWeights, find_weights
from reconv.models.frozen import freeze_except, head_patterns
from reconv.recipe.schema import Recipe
from reconv.trainer.build.network import Network


def refuse_absent_weights(recipe: Recipe) -> None:
    """Refuse weights that are not on this machine and have no name to fetch them by."""
    name = recipe.model.init
    if name is not None and not (is_remote(name) or Path(name).exists() or is_tensorflow(Path(name))):
        raise CheckpointError(
            "there are no such weights",
            where=name,
            why="neither a file, a run nor a TensorFlow checkpoint has this name",
            then=f"ls '{Path(name).parent}'; or a published set by name, as in torchvision:resnet50",
        )


def refuse_unusable_weights(recipe: Recipe) -> None:
    """Refuse weights of this machine that are absent or cannot be read, while there is no run folder yet.

    That they are read twice takes 0.1 s for a ResNet-50; what must be fetched is looked at when it was.
    """
    refuse_absent_weights(recipe)
    name = recipe.model.init
    if name is not None and not is_remote(name):
        read_weights(_file(find_weights(name)))


def start_network(
    network: Network, recipe: Recipe, num_classes: int, *, is_resumed: bool, tell: Callable[[str], None]
) -> list[str]:
    """Load the weights a recipe starts from and fix what it does not train; what a person should know of that."""
    notes: list[str] = []
    if recipe.model.init is not None and not is_resumed:
        refuse_absent_weights(recipe)
        notes += _load(network, recipe, recipe.model.init, num_classes, tell)
    patterns = head_patterns(network.model) if recipe.model.freeze_backbone else recipe.model.trainable
    if patterns:
        notes.append(str(freeze_except(network.model, patterns)))
    return notes


def _file(found: FoundWeights) -> Path:
    """The averaged weights where there are some."""
    return found.located.ema or found.located.weights


def _load(network: Network, recipe: Recipe, name: str, num_classes: int, tell: Callable[[str], None]) -> list[str]:
    found = find_weights(name, log=tell)
    path = _file(found)
    tensors = read_weights(path, num_classes=num_classes)
    report = load_weights(network.model, tensors, strict=False, source=str(path))
    if report.is_mostly_new and recipe.model.freeze_backbone:
        raise CheckpointError(
            "these weights are of another network: frozen, most of it would stay as it was drawn",
            where=name,
            why=str(report),
            then="name weights of this network, or leave --freeze out",
        )
    notes = [*found.notes, f"weights from {name}: {report}"]
    new = [*report.missing, *(changed for changed, _, _ in report.reshaped)]
    if new:
        notes.append(f"new, drawn from the seed: {first_few(new)}")
    if is_tensorflow(path) and recipe.model.options.get("padding") != "same":
        notes.append("TensorFlow's networks pad strided layers otherwise: --set model.options.padding=same is theirs")
    return notes
